"""Expert parallelism for a module of experts: a layer that takes its place.

Each rank dispatches a row for each token and chosen expert to the rank that has the expert, and
gets the expert's output back:

    tokens [T, H] -> rows [T K, H] by expert -> the experts' ranks -> module(rows, one choice each)
    -> back -> by token [T, K, H] -> times weights, summed over K

T tokens of this rank, K experts of each, H hidden, E experts, N ranks that split them, M rows that
arrive. Source: GShard (Lepikhin et al. 2020), section 3.2.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp.capabilities.experts.exchange import combine, dispatch
from zeropp.capabilities.experts.rows import RowsOfPairs, RowsOfTokens
from zeropp.wire.rank_group import RankGroup


class ExpertRanks:
    """The ranks that split experts. A copy of a model is whole, and its copy has none."""

    def __init__(self, group: RankGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, _: object) -> "ExpertRanks":
        return ExpertRanks(None)


class ExpertParallel(nn.Module):
    """Computes what `experts` does, on the ranks that have the experts.

    It has the parameters and children of `experts` under the same names, so that those of the model
    and of checkpoints stay the same. They are whole until they are split; whole ones, as in copies
    of a model, are computed with on this rank. `experts` must be as `find_experts` finds them.
    """

    def __init__(self, experts: nn.Module, ranks: ExpertRanks) -> None:
        super().__init__()
        self.num_experts, self.ranks = experts.num_experts, ranks
        for name, parameter in experts.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in experts.named_children():
            self.add_module(name, child)
        self.training = experts.training
        self._signature = inspect.signature(experts.forward)
        # In a tuple, it is no child: its parameters are those of this module.
        self._template = (_with(experts, {}, 0),)

    @torch.compiler.disable  # how many rows an expert has is known only when it runs
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map hidden_states [..., H], top_k_index and top_k_weights [T, K] to [..., H]."""
        x, index, weights = self._signature.bind(*args, **kwargs).arguments.values()
        own = dict(self.named_parameters(recurse=False))
        if not any(isinstance(each, DTensor) for each in own.values()):
            return self._computed(own, x, index, weights)
        own = {name: each.to_local() for name, each in own.items()}
        tokens, flat = x.flatten(0, -2), index.flatten()
        sorted_index, order = flat.sort(stable=True)
        numbers = torch.arange(self.num_experts + 1, device=flat.device)
        bounds = torch.searchsorted(sorted_index, numbers)
        order = order[: int(bounds[-1])]  # a choice beyond all experts is none
        rows = RowsOfPairs.apply(tokens, order, index.shape[1])
        sent = dispatch(rows, bounds.diff(), self.ranks.group)
        computed = self._of_own_experts(own, sent.rows, sent.counts)
        rows = combine(computed, sent, self.ranks.group)
        by_token = RowsOfTokens.apply(rows, order, index.numel())
        by_token = by_token.unflatten(0, (*x.shape[:-1], index.shape[1]))
        # no view, which a model may change in place: FSDP2's hooks would be lost
        return (by_token * weights.view(*by_token.shape[:-1], 1)).sum(-2).to(x.dtype)

    def _of_own_experts(self, own: Mapping[str, Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Return what this rank's experts make of rows [M, H], of which each has `counts` [E/N]."""
        if not len(rows):  # stays in the graph, and weights get gradients of zeros
            return rows + sum(each.flatten()[:0].sum() for each in own.values()).to(rows.dtype)
        numbers = torch.arange(len(counts), device=rows.device)
        index = numbers.repeat_interleave(counts, output_size=len(rows))[:, None]
        return self._computed(own, rows, index, rows.new_ones(len(rows), 1))

    def _computed(self, own: Mapping[str, Tensor], *inputs: Tensor) -> Tensor:
        (template,) = self._template
        return _with(template, own, len(next(iter(own.values()))))(*inputs)


def _with(experts: nn.Module, parameters: Mapping[str, Tensor], num_experts: int) -> nn.Module:
    """Return a module like `experts` that has other parameters, and shares all else with it."""
    other = copy.copy(experts)
    vars(other).update(_parameters=dict(parameters), num_experts=num_experts)
    return other
