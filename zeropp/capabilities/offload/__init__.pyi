from zeropp.capabilities.offload.host_masters import HOST as HOST
from zeropp.capabilities.offload.host_masters import require_host_memory as require_host_memory
from zeropp.capabilities.offload.offloaded_adam import offloaded_adamw as offloaded_adamw
