"""The only room that knows FSDP2's private names, for torch 2.11 to 2.14.

FSDP2 is the engine (docs/adr/0001): it gathers a unit's parameters before its forward and backward
and reduces their gradients afterwards. Most of ours enters through its extension points. Where it
has none, methods of its objects are replaced, one object at a time; each calls what it replaces.
docs/adr/0001 says why, and what would make that unnecessary. The collectives of a unit are set as
attributes of its parameter groups: FSDP2's methods for that refuse units of several.

| method                           | replaced in                  | so that                        |
|----------------------------------|------------------------------|--------------------------------|
| `FSDPState._root_pre_forward`    | `passes`                     | ranks compare before a pass    |
| `FSDPState._root_post_backward_` | `passes`                     | ranks compare after stages of  |
| `final_callback`                 |                              | pipelines reduced gradients    |
| `FSDPParamGroup.unshard`         | `gathered`                   | what is gathered of is noted   |
|                                  |                              | whole parameters are used      |
| `FSDPParamGroup.wait_for_unshard`| `gathered`                   | one rank copies shards once    |
| `FSDPParamGroup.post_backward`   | `gradients`                  | all ranks reduce one buffer    |
| `FSDPParamGroup.reshard`         | `gradients`                  | weights stay for later passes  |
| `FSDPParamGroup._to_sharded`     | `gathered`                   | weights stay between passes    |
| `FSDPParam.free_unsharded_param` | `gathered`                   | nobody reads freed memory      |
| `FSDPParam._setattr_on_modules`  | `uncalled_units`             | uncalled units are gathered    |
| `FSDPParam.init_unsharded_param` | `parameters`, `gathered`     | attributes and hooks stay      |
| `FSDPParam.reset_sharded_param`  | `gathered`                   | whole parameters can be loaded |
| `FSDPParam.to_sharded_dtensor`   | `gradients`                  | masters get means unrounded    |
| `generate` of wrapping models    | `passes`                     | it is a forward pass           |
| `__deepcopy__` of units' classes | `plain_copies`               | engines' models can be copied  |
"""

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zeropp.fsdp_adapter.foreign_units import (
    dtypes_of,
    frees_after_forward,
    gathered_dtypes,
    has_gather_hooks,
    keeps_part_after_forward,
    mixed_bytes,
    named_units,
    prefetches,
    shard_group,
)
from zeropp.fsdp_adapter.gathered import (
    OwnRows,
    WholeParameter,
    adopt_whole,
    before_use,
    free_gathered,
    gather_and_show,
    gather_whole,
    gathered_names,
    generate_alone,
    has_whole_parameters,
    in_backward,
    is_gathered,
    keep_whole,
    own_rows,
    show_between_passes,
    show_gathered,
    show_shards,
    use_whole_parameters,
    whole_of,
)
from zeropp.fsdp_adapter.gradients import (
    accumulates,
    adds_gradient,
    before_reduction,
    discard_gradients,
    reduce_accumulated,
    set_gradient_dtypes,
    take_gradients,
    unreduced_gradient,
)
from zeropp.fsdp_adapter.parameters import (
    ParamGroup,
    Unit,
    Versions,
    has_accumulation_hooks,
    hook_gradient,
    inherit,
    local_part,
    module_of,
    share_version,
    versions,
)
from zeropp.fsdp_adapter.passes import (
    abandon_pass,
    after_backward,
    awaits_end_of_backward,
    backward_id,
    before_pass,
    call_methods_by,
    is_in_pass,
    note_backward,
)
from zeropp.fsdp_adapter.plain_copies import plain_copy, use_deepcopy
from zeropp.fsdp_adapter.uncalled_units import UncalledUnits, shard_behind
from zeropp.fsdp_adapter.units import (
    AHEAD,
    Shard,
    ShardSpec,
    UnitCollectives,
    collectives_of,
    device_of,
    gather_ahead,
    gather_back,
    gather_in_turn,
    gather_input,
    has_run,
    is_on_host,
    is_trainable,
    name_of,
    own_shards,
    own_specs,
    refresh_parameters,
    replica_axes,
    replica_group,
    restore_collectives,
    shard_like,
    shard_of,
    shard_unit,
    sharded_dim,
    shards,
    store,
    use_all_gather,
    use_reduce_scatter,
)
