"""What a step did with its experts: the losses that balance them, their load, and their bias.

All ranks add what they have to one vector and sum it; stages of a pipeline have zeros for layers of
other stages, so that every rank has a vector of the same length.
L layers with experts, E experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from megatron_zpp.capabilities.experts.auxiliary_losses import GLOBAL_BALANCE, AuxiliaryLosses
from megatron_zpp.capabilities.experts.layer import MoE
from megatron_zpp.capabilities.experts.routing_record import RoutingRecord, RoutingStep
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.token_groups import TokenGroups
from megatron_zpp.settings.config import Config

# TensorBoard's names of the losses, which are Megatron's.
NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
# The share of a layer's tokens that its busiest expert has, and the rows that the experts of the
# busiest rank compute, where 1 is the mean over the ranks of its stage.
BUSIEST_EXPERT, BUSIEST_RANK = "experts/busiest expert", "experts/busiest rank"


@dataclass(frozen=True, kw_only=True)
class ExpertBalance:
    """Makes the records of steps, and turns them into numbers and steps of the bias."""

    config: Config
    ranks: Ranks

    @cached_property
    def layers(self) -> list[int]:
        """The layers with experts."""
        return [layer for layer, marked in enumerate(self.config.model.moe_layers) if marked]

    @cached_property
    def kinds(self) -> list[str]:
        """The losses that are computed."""
        return list(AuxiliaryLosses(self.config.model).coefficients)

    @cached_property
    def groups(self) -> TokenGroups:
        """The ranks over which tokens are counted."""
        return self.ranks.token_groups(
            splits_rows=self.config.parallel.sequence_parallel,
            sums_batch=GLOBAL_BALANCE in self.kinds,
        )

    def begin(self, num_micro_batches: int, scale: float | Tensor) -> RoutingStep:
        """Return the records of a step's micro-batches, whose losses are multiplied by `scale`."""
        # Ranks that share sequences have terms of a sum, and gradients are averaged over them.
        return RoutingStep(num_micro_batches, scale * self.groups.context_size, self.groups)

    @torch.no_grad()
    def end(
        self,
        step: RoutingStep,
        model: nn.Module,
        sum_over_nodes: Callable[[Tensor], Tensor] = lambda counts: counts,
    ) -> Mapping[str, Tensor]:
        """Return 0-d numbers of a step whose passes have ended, and move the bias of experts.

        The numbers are fp64 on the device, by their names. A collective of all ranks, and of all
        nodes over which `sum_over_nodes` adds up what the bias follows.
        """
        num_layers, num_kinds = len(self.layers), len(self.kinds)
        num_experts, device = self.config.model.num_experts, self.ranks.device
        counts = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        losses = torch.zeros(num_kinds, num_layers, dtype=torch.float64, device=device)
        rows = torch.zeros(self.ranks.num_ranks, dtype=torch.float64, device=device)
        for place, layer in enumerate(self.layers):
            records = [record for record in step if layer in record.assignments]
            if records and step.groups.is_counted:
                counts[place] = sum(each.assignments[layer].counts for each in records)
                losses[:, place] = self._losses(records, layer)
            rows[self.ranks.rank] += sum(each.num_rows[layer] for each in records)
        parts = [counts, losses, rows]
        total = self.ranks.sum_tensor(torch.cat([each.flatten() for each in parts]))
        sizes = [each.numel() for each in parts]
        counts, losses, rows = (
            each.view_as(part) for each, part in zip(total.split(sizes), parts, strict=True)
        )
        if self.config.model.moe_router_enable_expert_bias and not self.config.lora.lora_rank:
            self._move_bias(model, sum_over_nodes(counts))
        return dict(self._numbers(counts, losses, rows))

    def _losses(self, records: Sequence[RoutingRecord], layer: int) -> Tensor:
        """Return this rank's terms of a layer's losses, in the means over all micro-batches.

        The loss of a global batch is a sum over replicas.
        """
        means = []
        for kind in self.kinds:
            num_terms = len(records) * (1 if kind == GLOBAL_BALANCE else self.ranks.num_replicas)
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

    def _move_bias(self, model: nn.Module, counts: Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower that of others.

        Adapters are trained without it, as their model must stay as it is.
        """
        rate = self.config.model.moe_router_bias_update_rate
        places = {layer: place for place, layer in enumerate(self.layers)}
        for module in model.modules():
            if isinstance(module, MoE) and module.router.expert_bias is not None:
                n = counts[places[module.layer]]
                bias = module.router.expert_bias
                bias += rate * (n.mean() - n).sign().to(bias)
