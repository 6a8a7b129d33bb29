"""The parameter groups of units, in each version of FSDP2.

FSDP2 gathers and reduces a parameter group at once. A unit has one for each mesh that its
parameters are on: usually one, and two where some are sharded over other ranks than the rest of
their block.
"""

from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@dataclass(frozen=True)
class ParamGroup:
    """One of several parameter groups of a unit, to be used like a unit of these parameters."""

    module: FSDPModule
    index: int

    @property
    def training(self) -> bool:
        return self.module.training


Unit = FSDPModule | ParamGroup


def module_of(unit: Unit) -> FSDPModule:
    """Return the module whose passes gather a unit."""
    return unit.module if isinstance(unit, ParamGroup) else unit


def state_of(unit: Unit) -> object:
    return module_of(unit)._get_fsdp_state()


def parameters_of(unit: Unit) -> list[FSDPParam]:
    return [parameter for group in groups_of(unit) for parameter in group.fsdp_params]


def groups_of(unit: Unit) -> list:
    groups = groups_of_state(state_of(unit))
    return [groups[unit.index]] if isinstance(unit, ParamGroup) else groups


def groups_of_state(state: object) -> list:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11
