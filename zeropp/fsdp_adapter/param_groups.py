"""The groups of a unit's parameters, in each version of FSDP2."""

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def parameters_of(unit: FSDPModule) -> list[FSDPParam]:
    return [parameter for group in groups_of(unit) for parameter in group.fsdp_params]


def groups_of(unit: FSDPModule) -> list:
    return groups_of_state(unit._get_fsdp_state())


def groups_of_state(state: object) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11
