"""What the losses of arms say, seed by seed: differences to the baseline, over time and at the end.

Runs of one seed see the same samples in the same order and start from the same weights, so every
difference is taken within a seed, in parts of the baseline's loss, and only then averaged.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.convergence.arms import ARMS, BASELINE

WINDOW = 20  # iterations over which a training loss is averaged before arms are compared
TARGET = 0.005  # of the baseline's held-out loss: how far all three components may be from it
ACROSS = "/across_nodes"

Point = tuple[int, float]  # iteration, value
Runs = Mapping[str, Mapping[int, dict]]  # arm -> seed -> what the run found


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm beside the baseline; differences are parts of the baseline's loss of the same seed.

    bump: the largest difference of the smoothed training loss, averaged over seeds, and where.
    """

    arm: str
    seeds: int
    first: float  # mean held-out loss before training, nats per token
    final: float  # and at the end
    difference: float
    worst: float  # the largest difference of one seed
    worst_seed: int
    bump: float
    bump_at: int  # iteration
    node_bytes: float  # that a node sends to others per training step
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Curves:
    """An arm over the iterations, as means over the seeds; differences as in `Row`."""

    arm: str
    training: list[Point]
    held_out: list[Point]
    training_difference: list[Point]
    held_out_difference: list[Point]


def compare(runs: Runs) -> list[Row]:
    """A row for each arm, in the order of `runs`; every arm has the baseline's seeds."""
    return [_row(arm, of_seeds, runs[BASELINE]) for arm, of_seeds in runs.items()]


def curves(runs: Runs) -> list[Curves]:
    """The curves of each arm, in the order of `runs`."""
    return [_curves(arm, of_seeds, runs[BASELINE]) for arm, of_seeds in runs.items()]


def smoothed(losses: Sequence[float]) -> list[Point]:
    """Means over the last `WINDOW` iterations (over all, in a shorter run), from the first full."""
    window = min(WINDOW, len(losses))
    ends = range(window, len(losses) + 1)
    return [(end, statistics.fmean(losses[end - window : end])) for end in ends]


def to_json(rows: Sequence[Row]) -> list[dict]:
    """The rows as plain values."""
    return [asdict(row) for row in rows]


def text_table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    cells = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width)
                  for index, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )  # fmt: skip


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(rows: Sequence[Row]) -> str | None:
    """Whether all three together reach the target; None where they were not trained."""
    found = [row for row in rows if row.arm == "zeropp"]
    if not found:
        return None
    reached = "within" if abs(found[0].difference) <= TARGET else "NOT within"
    return (
        f"All three: held-out loss {100 * found[0].difference:+.2f}% from the baseline's, "
        f"{reached} {100 * TARGET:g}%."
    )


_HEADINGS = (
    "", "held-out loss", "to baseline", "worst seed", "largest bump", "at iteration",
    "MB across nodes", "ms a step",
)  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    common = (f"{row.final:.4f}",)
    told = (f"{row.node_bytes / 1e6:.2f}", f"{1e3 * row.step_seconds:.0f}")
    if row.arm == BASELINE:
        return (row.arm, *common, "-", "-", "-", "-", *told)
    differences = (_percent(row.difference), f"{_percent(row.worst)} ({row.worst_seed})")
    return (row.arm, *common, *differences, _percent(row.bump), str(row.bump_at), *told)


def _percent(part: float) -> str:
    return f"{100 * part:+.2f}%"


def _row(arm: str, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> Row:
    finals = {
        seed: run["held_out"][-1][1] / baseline[seed]["held_out"][-1][1] - 1
        for seed, run in of_seeds.items()
    }
    worst_seed = max(finals, key=lambda seed: finals[seed])
    over_time = _curves(arm, of_seeds, baseline).training_difference
    bump_at, bump = max(over_time, key=lambda point: point[1])
    across = [
        sum(sent for key, sent in run["node_bytes"].items() if key.endswith(ACROSS))
        for run in of_seeds.values()
    ]
    return Row(
        arm=arm,
        seeds=len(of_seeds),
        first=statistics.fmean(run["held_out"][0][1] for run in of_seeds.values()),
        final=statistics.fmean(run["held_out"][-1][1] for run in of_seeds.values()),
        difference=statistics.fmean(finals.values()),
        worst=finals[worst_seed],
        worst_seed=worst_seed,
        bump=bump,
        bump_at=bump_at,
        node_bytes=statistics.fmean(across),
        step_seconds=statistics.median(run["step_seconds"] for run in of_seeds.values()),
    )


def _curves(arm: str, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> Curves:
    assert of_seeds.keys() == baseline.keys() and arm in ARMS, (arm, of_seeds.keys())
    training = [smoothed(run["training"]) for run in of_seeds.values()]
    held_out = [run["held_out"] for run in of_seeds.values()]
    peers = [baseline[seed] for seed in of_seeds]
    return Curves(
        arm=arm,
        training=_mean(training),
        held_out=_mean(held_out),
        training_difference=_mean(
            [_apart(one, smoothed(peer["training"]))
             for one, peer in zip(training, peers, strict=True)]
        ),
        held_out_difference=_mean(
            [_apart(one, peer["held_out"]) for one, peer in zip(held_out, peers, strict=True)]
        ),
    )  # fmt: skip


def _apart(mine: Sequence[Point], theirs: Sequence[Point]) -> list[Point]:
    pairs = zip(mine, theirs, strict=True)
    return [(at, value / peer - 1) for (at, value), (_, peer) in pairs]


def _mean(series: Sequence[Sequence[Point]]) -> list[Point]:
    """Point by point over several series."""
    columns = zip(*series, strict=True)
    return [(column[0][0], statistics.fmean(value for _, value in column)) for column in columns]
