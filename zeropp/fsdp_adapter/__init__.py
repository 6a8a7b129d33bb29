"""The only room that knows FSDP2's private names, for torch 2.11 to 2.13.

FSDP2 is the engine (docs/adr/0001): it gathers a unit's parameters before its forward and backward
and reduces their gradients afterwards. Everything of ours enters through its extension points.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zeropp.fsdp_adapter.gathered import (
    before_use,
    free_gathered,
    gathered_names,
    in_backward,
    show_gathered,
    show_shards,
)
from zeropp.fsdp_adapter.gradients import (
    accumulates,
    before_reduction,
    discard_gradients,
    set_gradient_dtypes,
    take_gradients,
)
from zeropp.fsdp_adapter.parameters import (
    has_accumulation_hooks,
    inherit,
)
from zeropp.fsdp_adapter.passes import (
    abandon_pass,
    after_backward,
    awaits_end_of_backward,
    backward_id,
    is_in_pass,
)
from zeropp.fsdp_adapter.units import (
    AHEAD,
    ON_DEVICE,
    Piece,
    Shard,
    gather_ahead,
    gather_back,
    has_run,
    is_on_host,
    is_trainable,
    name_of,
    own_pieces,
    own_shards,
    refresh_parameters,
    replica_axes,
    shard_like,
    shard_unit,
    shards,
    store,
    use_all_gather,
    use_reduce_scatter,
)

__all__ = [
    "AHEAD",
    "AllGather",
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ON_DEVICE",
    "OffloadPolicy",
    "Piece",
    "ReduceScatter",
    "Shard",
    "abandon_pass",
    "accumulates",
    "after_backward",
    "awaits_end_of_backward",
    "backward_id",
    "before_reduction",
    "before_use",
    "discard_gradients",
    "free_gathered",
    "gather_ahead",
    "gather_back",
    "gathered_names",
    "has_accumulation_hooks",
    "has_run",
    "in_backward",
    "inherit",
    "is_in_pass",
    "is_on_host",
    "is_trainable",
    "name_of",
    "own_pieces",
    "own_shards",
    "refresh_parameters",
    "replica_axes",
    "set_gradient_dtypes",
    "shard_like",
    "shard_unit",
    "shards",
    "show_gathered",
    "show_shards",
    "store",
    "take_gradients",
    "use_all_gather",
    "use_reduce_scatter",
]
