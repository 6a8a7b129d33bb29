from zeropp.capabilities.offload.offload import HOST as HOST
from zeropp.capabilities.offload.offload import master_devices as master_devices
from zeropp.capabilities.offload.offload import require_host_memory as require_host_memory
from zeropp.capabilities.offload.offloaded import offloaded_adamw as offloaded_adamw
