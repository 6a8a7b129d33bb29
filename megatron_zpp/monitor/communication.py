"""What the nodes sent for training steps: the byte counts of all ranks, beside two formulas.

Weights and gradients of training steps only. What evaluation and generation gather is left out: it
comes at other times than steps do, and would hide what a step costs.
"""

from collections import Counter
from dataclasses import dataclass, field

from megatron_zpp.parallel.mesh import Ranks
from zeropp import Sharding
from zeropp.wire.traffic import HOPS, PURPOSES

KEYS = tuple((purpose, hop) for purpose in PURPOSES for hop in HOPS)
ACROSS_NODES, IN_NODE = "across_nodes", "in_node"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes sent in `steps` steps, by (purpose, hop): by a rank, or by a node, the mean of all.

    `expected` is what the formula says for these steps, `plain` what the same ZeRO stage would have
    sent without ZeRO++, on rings over all ranks.
    """

    steps: int = 0
    sent: Counter = field(default_factory=Counter)
    expected: Counter = field(default_factory=Counter)
    plain: Counter = field(default_factory=Counter)

    def __add__(self, other: "Communication") -> "Communication":
        return Communication(
            steps=self.steps + other.steps,
            sent=self.sent + other.sent,
            expected=self.expected + other.expected,
            plain=self.plain + other.plain,
        )

    def line(self) -> str:
        """A log line in Megatron's style: bytes across nodes, in all and by purpose, and within."""
        sent, expected = self.sent, self.expected
        values = {"across nodes": (sum_over(sent, ACROSS_NODES), sum_over(expected, ACROSS_NODES))}
        for purpose in PURPOSES:
            key = purpose, ACROSS_NODES
            values[purpose.replace("_", " ")] = sent[key], expected[key]
        values["in node"] = sum_over(sent, IN_NODE), sum_over(expected, IN_NODE)
        fields = [f" {name}: {self._with_formula(*pair)} |" for name, pair in values.items()]
        return " comm per node and step (MiB) |" + "".join(fields)

    def _with_formula(self, sent: float, expected: float) -> str:
        """MiB per step, and the formula's where the two differ by more than rounding."""
        measured = f"{sent / self.steps / MIB:.2f}"
        formula = f"{expected / self.steps / MIB:.2f}"
        return measured if measured == formula else f"{measured} (formula: {formula})"


class CommunicationMeter:
    """Adds up what this rank sends in training steps.

    `take` and `summary_rows` are collectives: all ranks call them.
    """

    def __init__(self, sharding: Sharding, ranks: Ranks) -> None:
        self._sharding, self._ranks = sharding, ranks
        self._formulas: dict[int, tuple[Counter, Counter]] = {}
        self._rank_interval, self._node_total = Communication(), Communication()

    def begin_step(self) -> None:
        """Discard what was sent since the last step."""
        self._sharding.traffic.take()

    def end_step(self, num_micro_batches: int) -> None:
        """Count what this rank sent since `begin_step`; nothing at stage 0 and on one rank.

        Stage 0 all-reduces by PyTorch's own collective, whose bytes are not counted.
        """
        if self._sharding.stage == 0 or self._sharding.num_ranks == 1:
            return
        expected, plain = self._formula(num_micro_batches)
        sent = Counter(self._sharding.traffic.take())
        self._rank_interval += Communication(steps=1, sent=sent, expected=expected, plain=plain)

    def take(self) -> Communication | None:
        """Return what a node sent since the last call; None if no step was counted."""
        interval, self._rank_interval = self._rank_interval, Communication()
        if not interval.steps:
            return None
        columns = interval.sent, interval.expected, interval.plain
        totals = self._ranks.sum(*(column[key] for column in columns for key in KEYS))
        nodes = self._sharding.forecast.weights.nodes
        num_nodes = self._ranks.num_ranks / (nodes.ranks_per_node * nodes.parts)
        means = iter(total / num_nodes for total in totals)
        sent, expected, plain = (Counter({key: next(means) for key in KEYS}) for _ in columns)
        node_interval = Communication(
            steps=interval.steps, sent=sent, expected=expected, plain=plain
        )
        self._node_total += node_interval
        return node_interval

    def summary_rows(self) -> list[tuple[str, str]]:
        """Rows for the end of the run: what went between nodes, beside plain ZeRO."""
        self.take()
        total, sharding = self._node_total, self._sharding
        sent, plain = sum_over(total.sent, ACROSS_NODES), sum_over(total.plain, ACROSS_NODES)
        if not sent:
            return []
        dtypes = dict.fromkeys((sharding.compute_dtype, sharding.forecast.wire_dtype))
        formats = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return [
            ("between nodes", _amount(sent, total.steps)),
            (
                f"plain ZeRO-{sharding.stage}",
                f"{_amount(plain, total.steps)}: {plain / sent:.1f} times as much\n"
                f"(by formula: {formats}, one ring over all ranks for each collective)",
            ),
        ]

    def _formula(self, num_micro_batches: int) -> tuple[Counter, Counter]:
        if num_micro_batches not in self._formulas:
            self._formulas[num_micro_batches] = (
                Counter(self._sharding.expected_traffic(num_micro_batches)),
                Counter(self._sharding.plain_traffic(num_micro_batches)),
            )
        return self._formulas[num_micro_batches]


def sum_over(num_bytes: Counter, hop: str) -> float:
    """Bytes of all purposes over one hop."""
    return sum(num_bytes[purpose, hop] for purpose in PURPOSES)


def _amount(num_bytes: float, steps: int) -> str:
    return f"{_size(num_bytes / steps)} per node and step, {_size(num_bytes)} in {steps:,} steps"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.2f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.2f} GiB"
