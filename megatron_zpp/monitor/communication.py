"""What the nodes sent for training steps: the byte counts of all ranks, beside two formulas.

Weights, gradients, what optimizers and replicas send, and the activations that ranks sharing
samples send each other, in training steps only. What evaluation and
generation send is left out: it comes at other times than steps do, and would hide what a step
costs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.parallel.replicas import OUTER
from megatron_zpp.recipe.activation_forecast import activation_traffic
from megatron_zpp.recipe.capability import Capability
from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp import Sharding
from zeropp.optim import OPTIMIZER, sharded
from zeropp.settings import declared
from zeropp.wire import AXES, HOPS, PURPOSES, CodedMessages, sum_of

OTHERS = (OPTIMIZER, OUTER, *AXES, *declared("PURPOSES", CAPABILITIES))  # named if in use
ALL_PURPOSES = (*PURPOSES, *OTHERS)
KEYS = tuple((purpose, hop) for purpose in ALL_PURPOSES for hop in HOPS)
ACROSS_NODES, IN_NODE = "across_nodes", "in_node"
MIB = 2**20
BYTES = (1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))
COUNTS = (1000, ("", "k", "M", "G", "T"))


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes sent in `steps` steps, by (purpose, hop): by a rank, or by a node, the mean of all.

    `expected` is what the formula says for these steps, `plain` what the same ZeRO stage would have
    sent without ZeRO++, on rings over the ranks of all replicas. `coded` is what coded messages of
    all ranks held. `exchange`: of all steps since the outer step before, if these steps contain
    one.
    """

    steps: int = 0
    sent: Counter = field(default_factory=Counter)
    expected: Counter = field(default_factory=Counter)
    plain: Counter = field(default_factory=Counter)
    coded: CodedMessages = CodedMessages()
    exchange: "Communication | None" = None

    def __add__(self, other: "Communication") -> "Communication":
        columns = ("sent", "expected", "plain")
        sums = {name: getattr(self, name) + getattr(other, name) for name in columns}
        coded = self.coded.plus(other.coded)
        return Communication(steps=self.steps + other.steps, coded=coded, **sums)

    @property
    def purposes(self) -> tuple[str, ...]:
        """The purposes of messages: weights, gradients, and the others in use."""
        others = [each for each in OTHERS if any(self.expected[each, hop] for hop in HOPS)]
        return (*PURPOSES, *others)

    @property
    def sent_per_step(self) -> Counter:
        """Means over steps: of exchanges, in the interval of one, over those since the one before.

        `OUTER` has no key in other intervals.
        """
        return self._per_step(lambda each: each.sent)

    def line(self) -> str:
        """A log line in Megatron's style: bytes across nodes, in all and by purpose, and within.

        Outer steps are in the lines of the intervals that contain one.
        """
        sent, expected = self.sent_per_step, self._per_step(lambda each: each.expected)
        values = {"across nodes": (sum_over(sent, ACROSS_NODES), sum_over(expected, ACROSS_NODES))}
        for purpose in self.purposes:
            key = purpose, ACROSS_NODES
            if key in sent:
                values[purpose.replace("_", " ")] = sent[key], expected[key]
        values["in node"] = sum_over(sent, IN_NODE), sum_over(expected, IN_NODE)
        fields = [f" {name}: {self._with_formula(*pair)} |" for name, pair in values.items()]
        return " comm per node and step (MiB) |" + "".join(fields)

    def _per_step(self, column: Callable[["Communication"], Counter]) -> Counter:
        own, other = column(self), self.exchange
        means = Counter({key: own[key] / self.steps for key in KEYS if key[0] != OUTER})
        if other is not None:
            shared = {key: column(other)[key] / other.steps for key in KEYS if key[0] == OUTER}
            means.update(shared)
        return means

    def _with_formula(self, sent: float, expected: float) -> str:
        """MiB per step, and the formula's where the two differ by more than rounding.

        Of coded messages it counts what they are before.
        """
        measured, formula = (f"{each / MIB:.2f}" for each in (sent, expected))
        name = "uncoded" if self.coded.num_bytes else "formula"
        return measured if measured == formula else f"{measured} ({name}: {formula})"


class CommunicationMeter:
    """Adds up what this rank sends in training steps.

    `take` and `summary_rows` are collectives: all ranks call them.
    """

    def __init__(
        self,
        sharding: Sharding,
        ranks: Ranks,
        micro_batch_size: int,
        optimizer: torch.optim.Optimizer | None = None,
        capabilities: Sequence[Capability] = (),
    ) -> None:
        self._sharding, self._ranks, self._micro_batch_size = sharding, ranks, micro_batch_size
        self._optimizer, self._capabilities = sharded(optimizer), capabilities
        self._formulas: dict[int, tuple[Counter, Counter]] = {}
        self._rank_interval, self._node_total = Communication(), Communication()
        self._since_exchange = Communication()
        self.forecast = Counter()  # what `expected_on_node` returned last

    def begin_step(self) -> None:
        """Discard what was sent since the last step."""
        self._take()

    def end_step(self, num_micro_batches: int, iteration: int) -> None:
        """Count what this rank sent since `begin_step`, in an iteration.

        Outer steps are counted by `take`. Stage 0 all-reduces by PyTorch's own collective, whose
        bytes are not counted.
        """
        expected, plain = self._formula(num_micro_batches)
        if outer := self._ranks.replicas.expected(iteration):
            expected = Counter(expected)
            expected.update(outer)
        if not expected:
            return
        sent = self._take()
        self._rank_interval += Communication(
            steps=1,
            sent=sent,
            expected=expected,
            plain=plain,
            coded=self._sharding.traffic.take_coded(),  # those of evaluations, too
        )

    def expected_on_node(self, num_micro_batches: int) -> Counter:
        """Return what a node will send per step, the mean of all; a collective.

        Where the interval grows, it is that of the last steps.
        """
        expected = Counter(self._sharding.expected_traffic(num_micro_batches, typical=True))
        expected.update(self._beside(num_micro_batches))
        expected.update(self._ranks.replicas.expected())
        (mean,), _ = self._on_node([expected])
        self.forecast = Counter({key: mean[key] for key in KEYS if key[0] in PURPOSES or mean[key]})
        return self.forecast

    def take(self) -> Communication | None:
        """Return what a node sent since the last call; None if no step was counted."""
        interval, self._rank_interval = self._rank_interval, Communication()
        if not interval.steps:
            return None
        if (outer := self._ranks.replicas.ledger) is not None:
            interval.sent.update(outer.take())
        columns = interval.sent, interval.expected, interval.plain
        (sent, expected, plain), counts = self._on_node(columns, interval.coded)
        node_interval = Communication(
            steps=interval.steps,
            sent=sent,
            expected=expected,
            plain=plain,
            coded=CodedMessages(*counts),
        )
        self._node_total += node_interval
        self._since_exchange += node_interval
        if any(sent[OUTER, hop] for hop in HOPS):
            exchange, self._since_exchange = self._since_exchange, Communication()
            node_interval = replace(node_interval, exchange=exchange)
        return node_interval

    def summary_rows(self) -> list[tuple[str, str]]:
        """Rows for the end of the run: bytes between nodes, compared with plain ZeRO."""
        self.take()
        total, sharding = self._node_total, self._sharding
        sent, plain = sum_over(total.sent, ACROSS_NODES), sum_over(total.plain, ACROSS_NODES)
        if not sent:
            return []
        per_step = f"{size(sent / total.steps)} per node and step"
        between = ("between nodes", f"{per_step}, {size(sent)} in {total.steps:,} steps")
        if not sharding.plan.units or self._ranks.replicas.count * sharding.num_ranks == 1:
            return [between]
        dtypes = dict.fromkeys((sharding.compute_dtype, sharding.plan.units[0].wire_dtype))
        formats = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return [
            between,
            (
                f"plain ZeRO-{sharding.stage}",
                f"{size(plain / total.steps)} per node and step: {plain / sent:.1f} times as much\n"
                f"(by formula: {formats},\none ring over all ranks for each collective)",
            ),
        ]

    def _on_node(
        self, columns: Sequence[Counter], counts: Sequence[int] = ()
    ) -> tuple[list[Counter], list[float]]:
        """Sum the columns over the ranks of a node, averaged over all nodes, and `counts` over all
        ranks; all ranks call it."""
        numbers = [column[key] for column in columns for key in KEYS]
        ranks = self._ranks
        totals = ranks.sum_over_replicas(*numbers, *counts)
        num_nodes = ranks.replicas.count * max(1, ranks.num_ranks / ranks.nodes.ranks_per_node)
        means = iter(total / num_nodes for total in totals[: len(numbers)])
        return [Counter({key: next(means) for key in KEYS}) for _ in columns], totals[
            len(numbers) :
        ]

    def _formula(self, num_micro_batches: int) -> tuple[Counter, Counter]:
        if num_micro_batches not in self._formulas:
            sharding, expected, plain = self._sharding, Counter(), Counter()
            if sharding.stage > 0 and sharding.num_ranks > 1:
                expected.update(sharding.expected_traffic(num_micro_batches))
            if sharding.stage > 0:
                replicas = self._ranks.replicas
                plain.update(
                    sharding.plain_traffic(
                        num_micro_batches, worlds=replicas.count, world=replicas.index
                    )
                )
            beside = self._beside(num_micro_batches)
            expected.update(beside)
            plain.update(beside)
            self._formulas[num_micro_batches] = expected, plain
        return self._formulas[num_micro_batches]

    def _take(self) -> Counter:
        """Return what this rank sent in steps since this was last called."""
        sent = Counter(self._sharding.traffic.take())
        sent.update(self._ranks.activations.take())
        for each in (self._optimizer, *self._capabilities):
            if each.ledger is not None:
                sent.update(each.ledger.take())
        return sent

    def _beside(self, num_micro_batches: int) -> Counter:
        """Return what is expected of activations, the optimizer and capabilities."""
        expected: Counter = Counter()
        has_other_axes = self._ranks.data_parallel_size < self._ranks.num_ranks
        if has_other_axes or self._sharding.model.part.axes:
            sizes = self._micro_batch_size, num_micro_batches
            expected.update(activation_traffic(self._sharding, self._ranks, *sizes))
        expected.update(sum_of(self._optimizer.messages()))
        for each in self._capabilities:
            expected.update(sum_of(each.messages(num_micro_batches)))
        return expected


def sum_over(num_bytes: Counter, hop: str) -> float:
    """Bytes of all purposes over one hop."""
    return sum(num_bytes[purpose, hop] for purpose in ALL_PURPOSES)


def size(number: float, units: tuple[int, tuple[str, ...]] = BYTES) -> str:
    """The first three digits of a number in the unit that suits it, for example 7.20 MiB."""
    base, (unit, *larger) = units
    while number >= 999.5 and larger:
        number, unit = number / base, larger.pop(0)
    decimals = 0 if number >= 99.95 or not unit.strip("B ") else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f}{unit}"
