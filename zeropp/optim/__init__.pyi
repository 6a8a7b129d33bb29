from zeropp.capabilities.muon.muon import Muon as Muon
from zeropp.optim.adam import FusedAdam as FusedAdam
from zeropp.optim.cpu_adam import CPUAdam as CPUAdam
