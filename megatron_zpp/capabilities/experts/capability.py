"""What experts say of a GPT's run: their ranks, losses that balance them, their load and bias.

After a step's passes all ranks add what they have to one vector and sum it; stages of a pipeline
have zeros for layers of other stages, so that every rank has a vector of the same length.
L layers with experts, E experts.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.capabilities.experts.auxiliary_losses import GLOBAL_BALANCE, AuxiliaryLosses
from megatron_zpp.capabilities.experts.axis import (
    AXIS_NAMES,
    NAME,
    ExpertAxis,
    expert_axis,
    expert_ranks,
)
from megatron_zpp.capabilities.experts.layer import MoE
from megatron_zpp.capabilities.experts.log import BUSIEST_EXPERT, BUSIEST_RANK
from megatron_zpp.capabilities.experts.routing_record import RoutingRecord, routing_records
from megatron_zpp.model.gpt import GPT
from megatron_zpp.recipe.capability import Capability
from zeropp import Sharding
from zeropp.settings import no_effect_line
from zeropp.wire import UNQUANTIZED, Nodes, RankGroup

# TensorBoard's names of the losses, which are Megatron's.
NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}

log = logging.getLogger("megatron_zpp")


@dataclass(kw_only=True)
class ExpertCapability(Capability):
    """Layers of experts, which ranks may split, and the balance of their load."""

    setting = ("model.has_experts", True)
    splits = NAME

    def settled(self, nodes: Nodes) -> Mapping[str, Any]:
        """Return how many ranks split experts.

        Raises InputError for a --expert-model-parallel-size that does not fit.
        """
        return {"expert_model_parallel_size": self._num_ranks(nodes)}

    def axis(self) -> ExpertAxis | None:
        """Return the axis over which ranks split experts, if they do.

        Raises InputError for a --expert-model-parallel-size that does not fit.
        """
        return self._axis

    def before_allocation(self, sharding: Sharding, device: torch.device) -> None:
        """Log which settings have no effect."""
        self._log_settings_without_effect()

    def model_rows(self, model: GPT) -> Iterator[tuple[str, str]]:
        """Yield how many experts there are, and which ranks have them."""
        shape, axis = self.config.model, self._axis
        text = (
            f"{shape.num_experts} in {sum(shape.moe_layers)} of {shape.num_layers} layers, "
            f"{shape.moe_router_topk} for each token"
        )
        if axis is not None:
            text += f"\n{axis.size} ranks split them, {(axis.across or axis.group).where}"
            if axis.across is not None:
                coded = f", towards experts as INT{axis.bits}" if axis.bits < UNQUANTIZED else ""
                text += f";\ntokens cross once to each node{coded}"
        yield "experts", text

    def records(self, num_micro_batches: int, scale: float | Tensor) -> list[RoutingRecord]:
        """Return the records of a step's micro-batches, whose losses are multiplied by `scale`."""
        # Ranks that share sequences have terms of a sum, and gradients are averaged over them.
        return routing_records(num_micro_batches, scale * self.ranks.context_size, **self.groups)

    @torch.no_grad()
    def after_passes(self, step: int, records: Sequence[RoutingRecord]) -> Mapping[str, Tensor]:
        """Return the losses that balance experts, and their loads, by name; move the bias.

        The bias follows what replicas sum that train independently.
        """
        num_layers, num_kinds = len(self.layers), len(self.kinds)
        splits_rows = self.config.parallel.sequence_parallel  # else tensor ranks have the same
        num_experts, device = self.config.model.num_experts, self.ranks.device
        counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        losses = torch.zeros(num_kinds, num_layers, dtype=torch.float64, device=device)
        rows = torch.zeros(self.ranks.num_ranks, dtype=torch.float64, device=device)
        for place, layer in enumerate(self.layers):
            own = [record for record in records if layer in record.assignments]
            if own and (splits_rows or self.ranks.tensor_rank == 0):
                counts[place] = sum(each.assignments[layer].counts for each in own)
                losses[:, place] = self._losses(own, layer)
            rows[self.ranks.rank] += sum(each.num_rows[layer] for each in own)
        parts = [counts, losses, rows]
        total = self.ranks.sum_tensor(torch.cat([each.flatten() for each in parts]))
        sizes = [each.numel() for each in parts]
        counts, losses, rows = (
            each.view_as(part) for each, part in zip(total.split(sizes), parts, strict=True)
        )
        if self.config.model.moe_router_enable_expert_bias and self.config.trains_all:
            self._move_bias(self.ranks.replicas.sum_in_step(step, counts))
        return dict(self._numbers(counts, losses, rows))

    def _losses(self, records: Sequence[RoutingRecord], layer: int) -> Tensor:
        """Return this rank's terms of a layer's losses, in the means over all micro-batches.

        The loss of a global batch is a sum over replicas.
        """
        means = []
        for kind in self.kinds:
            num_terms = len(records) * (
                1 if kind == GLOBAL_BALANCE else self.ranks.data_parallel_size
            )
            means.append(sum(each.losses[kind, layer].double() for each in records) / num_terms)
        return torch.stack(means) if means else torch.zeros(0, dtype=torch.float64)

    def _numbers(
        self, counts: Tensor, losses: Tensor, rows: Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the numbers of a step by their names."""
        for kind, by_layer in zip(self.kinds, losses, strict=True):
            yield NAMES[kind], by_layer.mean()
            if self.config.model.moe_per_layer_logging:
                for layer, loss in zip(self.layers, by_layer, strict=True):
                    yield f"moe/{NAMES[kind]}_layer_{layer}", loss
        yield BUSIEST_EXPERT, (counts / counts.sum(1, keepdim=True).clamp(min=1)).max()
        by_stage = rows.view(self.ranks.pipeline_size, -1)
        yield BUSIEST_RANK, (by_stage / by_stage.mean(1, keepdim=True).clamp(min=1)).max()

    def _move_bias(self, counts: Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower that of others.

        Where weights are frozen it stays, as the model must.
        """
        rate = self.config.model.moe_router_bias_update_rate
        places = {layer: place for place, layer in enumerate(self.layers)}
        for module in self.sharding.model.modules():
            if isinstance(module, MoE) and module.router.expert_bias is not None:
                n = counts[places[module.layer]]
                bias = module.router.expert_bias
                bias += rate * (n.mean() - n).sign().to(bias)

    @cached_property
    def layers(self) -> list[int]:
        """The layers with experts."""
        return [layer for layer, marked in enumerate(self.config.model.moe_layers) if marked]

    @cached_property
    def kinds(self) -> list[str]:
        """The losses that are computed."""
        return list(AuxiliaryLosses(self.config.model).coefficients)

    @cached_property
    def groups(self) -> dict[str, RankGroup]:
        """The ranks of this one's stage over which tokens are counted, as of a `RoutingRecord`."""
        pipe, _, tensor = self.ranks.places
        batch = self.ranks.grid[pipe]
        if not self.config.parallel.sequence_parallel:
            batch = batch[:, tensor : tensor + 1]
        first = self.ranks.data_parallel_rank * self.ranks.context_size
        members = {"samples": batch[first : first + self.ranks.context_size]}
        if GLOBAL_BALANCE in self.kinds:
            members["batch"] = batch
        return {
            name: self.ranks.rank_group("tokens", ranks.flatten().tolist())
            for name, ranks in members.items()
            if ranks.numel() > 1
        }

    @cached_property
    def _axis(self) -> ExpertAxis | None:
        size = self._num_ranks(self.ranks.nodes)
        return expert_axis(self.ranks, size, self.config.parallel.moe_dispatch_bits)

    def _num_ranks(self, nodes: Nodes) -> int:
        config = self.config
        return expert_ranks(config.model, config.parallel, config.zero.stage, nodes)

    def _log_settings_without_effect(self) -> None:
        """Log which settings do nothing for experts that are split like this."""
        axis, bits, reasons = self._axis, self.config.parallel.moe_dispatch_bits, {}
        if bits < UNQUANTIZED and (axis is None or axis.across is None):
            reasons[f"--moe-dispatch-bits {bits}"] = (
                "no token crosses nodes: that needs an --expert-model-parallel-size of several "
                "nodes"
            )
        hpz = self.config.zero.zero_optimization.zero_hpz_partition_size
        if hpz > 1 and axis is not None and axis.mesh[AXIS_NAMES[0]].size() == 1:
            reasons[f"zero_optimization.zero_hpz_partition_size = {hpz}, for experts,"] = (
                f"each rank has its own whole, as --expert-model-parallel-size {axis.size} splits "
                "them over all ranks, so that there is nothing to copy; other weights are copied"
            )
        for line in (no_effect_line({name: why}) for name, why in reasons.items()):
            log.info("%s", line)


CAPABILITY = ExpertCapability
