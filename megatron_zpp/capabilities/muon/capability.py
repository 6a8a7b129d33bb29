"""What Muon says of a GPT's run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zpp.capabilities.muon.matrix_parts import matrix_parts
from megatron_zpp.capabilities.muon.settings import MuonConfig
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.monitor.communication import COUNTS, size
from megatron_zpp.recipe.capability import Capability, OwnGroup
from zeropp import Sharding, ZeroConfig
from zeropp.capabilities.muon import (
    NODE,
    WHOLE,
    Muon,
    MuonOptions,
    build_offloaded_muon,
    coefficients_of,
)


def muon_options(muon: MuonConfig, zero: ZeroConfig) -> MuonOptions:
    """Return where matrices are orthogonalized, and in which numbers."""
    dtype = None if muon.muon_fp32_matmul_prec == "medium" else torch.float32
    return MuonOptions.of(zero, tp_mode=muon.muon_tp_mode, dtype=dtype)


def uses_muon(name: str, parameter: torch.nn.Parameter) -> bool:
    """Whether Muon moves a parameter of a GPT: matrices of blocks, but not those of deltas."""
    return name.startswith("blocks.") and parameter.ndim == 2 and not is_of_delta(name)


@dataclass(kw_only=True)
class MuonCapability(Capability):
    """Muon for matrices of blocks, and AdamW for the rest."""

    setting = ("optimizer.optimizer", "muon")
    own_group = OwnGroup("use_muon", uses_muon)

    def build_optimizer(
        self, sharding: Sharding, groups: list[dict], device: torch.device, adam: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Build Muon, or Muon on masters in host memory."""
        muon, zero = self.config.muon, self.config.zero
        steps = muon.muon_num_ns_steps
        of_muon = {
            "momentum": muon.muon_momentum,
            "nesterov": muon.muon_nesterov,
            "ns_coefficients": coefficients_of(muon.muon_coefficient_type, steps),
            "ns_steps": steps,
            "scale_mode": muon.muon_scale_mode,
            "extra_scale_factor": muon.muon_extra_scale_factor,
            "options": muon_options(muon, zero),
            "parts": matrix_parts(sharding.model, self.config.model, muon),
        }
        if zero.offloads_optimizer:
            return build_offloaded_muon(sharding, groups, device, zero, adam, **of_muon)
        settings = {"adam_eps" if name == "eps" else name: each for name, each in adam.items()}
        return Muon(groups, config=zero, **settings, **of_muon)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield which matrices are orthogonalized where, and what that costs a rank."""
        optimizer = self.optimizer
        if optimizer is None:  # the run is planned, and the planner says what it costs
            return
        options, matrices = optimizer.matrices.options, optimizer.muon_parameters
        share = sum(each.numel() for each in matrices) / sum(
            each.numel() for group in optimizer.param_groups for each in group["params"]
        )
        blocks = options.blocks if self.sharding.shards_gradients else WHOLE
        where = {"node": "rows of a node", "rank": "rows of a rank", "whole": "all rows"}
        text = f"Muon for {share:.0%} of the weights, {where[blocks]} together"
        if options.whole_every is not None and blocks != WHOLE:
            text += f", all in every {options.whole_every} steps"
        text += f"\n{size(optimizer.flops(), COUNTS)} operations of a rank in a step"
        yield "optimizer", text

    def changes(self, saved: Mapping[str, Any], num_ranks: int) -> Iterator[str]:
        """Yield a line if other rows are orthogonalized together than before the checkpoint."""
        own, old = self.config.zero.zeropp, saved["zero"].get("zeropp", {})
        blocks = own.muon_blocks, own.muon_whole_every
        old_blocks = old.get("muon_blocks", NODE), old.get("muon_whole_every")
        now = *blocks, own.ranks_per_node, dist.get_world_size() if dist.is_initialized() else 1
        before = *old_blocks, old.get("ranks_per_node"), num_ranks
        depends_on_ranks = {blocks, old_blocks} != {(WHOLE, None)}
        if now != before and depends_on_ranks:
            text = "muon_blocks %s, muon_whole_every %s, ranks_per_node %s on %d ranks"
            yield f"Muon: {text} now, {text} in the checkpoint" % (*now, *before)


CAPABILITY = MuonCapability
