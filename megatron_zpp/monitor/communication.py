"""What the nodes sent for their steps: the ledgers of all ranks, beside two formulas.

Weights and gradients of training steps only. What evaluation and generation gather is left out: it
comes at other times than steps do, and would hide what a step costs.
"""

from collections import Counter
from dataclasses import dataclass, field

from megatron_zpp.parallel.mesh import Ranks
from zeropp import Sharding
from zeropp.wire.traffic import HOPS, PURPOSES

KEYS = tuple((purpose, hop) for purpose in PURPOSES for hop in HOPS)
FAR, NEAR = "across_nodes", "in_node"
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Bytes sent in `steps` steps, by (purpose, hop): of a rank, or of a node, the mean of all.

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

    def scalars(self) -> dict[str, float]:
        """Bytes per step, under TensorBoard's names."""
        named = {f"comm/{purpose}_{hop}": self.sent[purpose, hop] for purpose, hop in KEYS}
        named |= {f"comm/{hop}": over(self.sent, hop) for hop in HOPS}
        named[f"comm/expected_{FAR}"] = over(self.expected, FAR)
        return {name: num_bytes / self.steps for name, num_bytes in named.items()}

    def line(self) -> str:
        """What went across nodes, in all and by purpose, and what did not; in Megatron's style."""
        pairs = {"across nodes": (over(self.sent, FAR), over(self.expected, FAR))}
        for purpose in PURPOSES:
            pairs[purpose.replace("_", " ")] = self.sent[purpose, FAR], self.expected[purpose, FAR]
        pairs["in node"] = over(self.sent, NEAR), over(self.expected, NEAR)
        fields = [f" {name}: {self._beside(*pair)} |" for name, pair in pairs.items()]
        return " comm per node and step (MiB) |" + "".join(fields)

    def _beside(self, sent: float, expected: float) -> str:
        """MiB per step, and the formula's where they differ by more than rounding."""
        measured, formula = (f"{each / self.steps / MIB:.2f}" for each in (sent, expected))
        return measured if measured == formula else f"{measured} (formula: {formula})"


class Account:
    """Adds up the training steps of this rank; `take` and `rows` are called by all ranks."""

    def __init__(self, sharding: Sharding, ranks: Ranks) -> None:
        self._sharding, self._ranks = sharding, ranks
        self._formulas: dict[int, tuple[Counter, Counter]] = {}
        self._mine, self._total = Communication(), Communication()

    def begin_step(self) -> None:
        """Leave out what was sent since the last step."""
        self._sharding.traffic.take()

    def end_step(self, num_micro_batches: int) -> None:
        """Enter what this rank sent since `begin_step`; nothing at stage 0 and on one rank.

        Stage 0 all-reduces by PyTorch's own collective, which no ledger sees.
        """
        if self._sharding.stage == 0 or self._sharding.num_ranks == 1:
            return
        expected, plain = self._formula(num_micro_batches)
        sent = Counter(self._sharding.traffic.take())
        self._mine += Communication(steps=1, sent=sent, expected=expected, plain=plain)

    def take(self) -> Communication | None:
        """What a node sent since the last call; None if there were no steps to enter."""
        mine, self._mine = self._mine, Communication()
        if not mine.steps:
            return None
        columns = mine.sent, mine.expected, mine.plain
        everywhere = self._ranks.sum(*(column[key] for column in columns for key in KEYS))
        num_nodes = self._sharding.forecast.weights.nodes.count
        means = iter(num_bytes / num_nodes for num_bytes in everywhere)
        sent, expected, plain = (Counter({key: next(means) for key in KEYS}) for _ in columns)
        taken = Communication(steps=mine.steps, sent=sent, expected=expected, plain=plain)
        self._total += taken
        return taken

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the run's ending: what went between nodes, beside plain ZeRO; for all ranks."""
        self.take()
        total, sharding = self._total, self._sharding
        sent, plain = over(total.sent, FAR), over(total.plain, FAR)
        if not sent:
            return []
        formats = dict.fromkeys((sharding.compute_dtype, sharding.forecast.wire_dtype))
        width = " and ".join(str(one).removeprefix("torch.") for one in formats)
        return [
            ("between nodes", _amount(sent, total.steps)),
            (
                f"plain ZeRO-{sharding.stage}",
                f"{_amount(plain, total.steps)}: {plain / sent:.1f} times as much\n"
                f"(by formula: {width}, one ring over all ranks for each collective)",
            ),
        ]

    def _formula(self, num_micro_batches: int) -> tuple[Counter, Counter]:
        if num_micro_batches not in self._formulas:
            self._formulas[num_micro_batches] = (
                Counter(self._sharding.expected_traffic(num_micro_batches)),
                Counter(self._sharding.plain_traffic(num_micro_batches)),
            )
        return self._formulas[num_micro_batches]


def over(sent: Counter, hop: str) -> float:
    """Bytes of all purposes by one hop."""
    return sum(sent[purpose, hop] for purpose in PURPOSES)


def _amount(num_bytes: float, steps: int) -> str:
    return f"{_size(num_bytes / steps)} per node and step, {_size(num_bytes)} in {steps:,} steps"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.2f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.2f} GiB"
