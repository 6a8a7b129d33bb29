from zeropp import optim as optim
from zeropp import zero as zero
from zeropp.capabilities.local_sgd.any_trainer import NodeSteps as NodeSteps
from zeropp.capabilities.local_sgd.any_trainer import local_steps as local_steps
from zeropp.deepspeed.build_engine import initialize as initialize
from zeropp.deepspeed.engine import Engine as Engine
from zeropp.errors import InputError as InputError
from zeropp.optim.adam import FusedAdam as FusedAdam
from zeropp.optim.loss_scale import LossScaler as LossScaler
from zeropp.optim.step_or_skip import StepResult as StepResult
from zeropp.optim.step_or_skip import optimizer_step as optimizer_step
from zeropp.settings.zero_config import ZeroConfig as ZeroConfig
from zeropp.sharding.attach import Attached as Attached
from zeropp.sharding.attach import attach as attach
from zeropp.sharding.shard import shard as shard
from zeropp.sharding.sharding import Sharding as Sharding

__version__: str
