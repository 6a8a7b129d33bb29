"""Muon on master weights in host memory: momentum there, products where the model computes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropp.capabilities.muon.blocks import Matrix
from zeropp.capabilities.muon.groups import listed, muon_options
from zeropp.capabilities.muon.matrix_step import MatrixStep, MuonOptions
from zeropp.capabilities.muon.muon import MuonGroups
from zeropp.capabilities.offload.host_masters import Offload
from zeropp.capabilities.offload.master_state_dicts import use_in_state_dicts
from zeropp.capabilities.offload.offloaded_adam import OffloadedAdam
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.sharding import Sharding


class OffloadedMuon(MuonGroups, OffloadedAdam):
    """Muon for the groups with `use_muon` of an `OffloadedAdam`."""

    def __init__(
        self,
        offload: Offload,
        groups: list[dict[str, Any]],
        matrices: MatrixStep,
        of_muon: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        self.matrices, self.of_muon = matrices, of_muon
        super().__init__(offload, groups, **settings)

    def _moved(self, parameters: Sequence[Tensor]) -> None:
        self.offload.send(parameters)


def build_offloaded_muon(
    sharding: Sharding,
    groups: list[dict[str, Any]],
    device: torch.device,
    config: ZeroConfig,
    adam: Mapping[str, Any],
    *,
    options: MuonOptions,
    parts: Mapping[Tensor, Matrix],
    **of_muon: Any,
) -> OffloadedMuon:
    """Build Muon from the JSON's `offload_optimizer`, for a model that computes on `device`.

    `adam` are the settings of AdamW, the other arguments those of `Muon`. Raises InputError for
    delayed updates, and as `Offload` and `Muon` do.
    """
    if config.zeropp.delayed_param_update:
        raise InputError(
            "zeropp.delayed_param_update runs an update beside the next step, whose collectives "
            "those of Muon would meet: leave it out, or use Adam"
        )
    offload = Offload(sharding, device, **config.masters)
    of_masters = {offload.masters[each]: matrix for each, matrix in parts.items()}
    matrices = MatrixStep(config, options, device, of_masters)
    optimizer = OffloadedMuon(offload, listed(groups), matrices, muon_options(**of_muon), **adam)
    use_in_state_dicts(sharding.model, optimizer)
    return optimizer
