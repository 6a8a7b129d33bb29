"""What the passes of a step decide and measure in layers with experts.

A layer that backward recomputes runs twice. Its experts are chosen and its tokens counted the first
time only, as a tie may fall otherwise in the second. Records are therefore written by layer, and
never added to. Passes without a record, those of evaluation and generation, count nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zeropp.wire import Nodes, RankGroup, everyone

ONE_RANK = everyone(Nodes(num_ranks=1, ranks_per_node=1), 0)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which experts compute which tokens.

    experts: int64 [T, K] of each token. order: int64 [M], the pairs of a token and an expert in the
    order of the experts; pair p is of token p / K. Pairs that are dropped are left out. counts:
    int64 [E], how many pairs each expert has in that order.
    """

    experts: Tensor
    order: Tensor
    counts: Tensor


@dataclass(kw_only=True)
class RoutingRecord:
    """The record of one micro-batch.

    scale: what the gradients of the losses in its layers are multiplied by, a number or 0-d.
    samples: the ranks that have parts of this one's samples. batch: those with parts of the global
    batch. earlier: the records of the step's micro-batches before. assignments: by layer. losses:
    0-d, by kind and layer, without coefficients; of losses that are sums over ranks, this rank's
    term. num_rows: rows that this rank's experts computed, by layer.
    """

    scale: float | Tensor = 1.0
    samples: RankGroup = ONE_RANK
    batch: RankGroup = ONE_RANK
    earlier: Sequence["RoutingRecord"] = ()
    assignments: dict[int, Assignment] = field(default_factory=dict)
    losses: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    num_rows: dict[int, int] = field(default_factory=dict)
    _totals: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def assignment(self, layer: int, assign: Callable[[], Assignment]) -> Assignment:
        """Return what `assign` returned when the layer first ran."""
        if layer not in self.assignments:
            self.assignments[layer] = assign()
        return self.assignments[layer]

    def forget_tokens(self, layers: Iterable[int]) -> None:
        """Free what only passes through these layers need: of each token, its experts.

        How many tokens each expert has stays until the end of the step.
        """
        for layer in self.assignments.keys() & set(layers):
            counts = self.assignments[layer].counts
            none = counts.new_empty(0)
            self.assignments[layer] = Assignment(experts=none, order=none, counts=counts)

    def total(self, kind: str, layer: int, count: Callable[[], Tensor]) -> Tensor:
        """Return the counts [..., E] that the loss of this kind is computed with."""
        key = kind, layer
        if key not in self._totals:
            self._totals[key] = count()
        return self._totals[key]

    def mean_so_far(self, kind: str, layer: int, counts: Tensor) -> Tensor:
        """Return the mean of this micro-batch's counts and those of the ones before, fp32."""
        before = [record.own_counts[kind, layer] for record in self.earlier]
        self.own_counts[kind, layer] = counts
        return sum(before, start=counts).float() / (1 + len(before))

    own_counts: dict[tuple[str, int], Tensor] = field(default_factory=dict)


def routing_records(
    num_micro_batches: int, scale: float | Tensor = 1.0, **groups: RankGroup
) -> list[RoutingRecord]:
    """Return the records of a step's micro-batches, whose tokens are counted over `groups`."""
    records: list[RoutingRecord] = []
    for _ in range(num_micro_batches):
        records.append(RoutingRecord(scale=scale, earlier=tuple(records), **groups))
    return records
