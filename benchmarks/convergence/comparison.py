"""Differences of the variants' losses from the baseline's, over time and at the end.

Runs of one seed see the same samples in the same order and start from the same weights. So every
difference is taken within a seed, relative to the baseline's loss, and only then averaged.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.convergence.variants import BASELINE, VARIANTS
from benchmarks.shared.table import Column
from benchmarks.shared.table import table as columns_of

WINDOW = 20  # iterations over which training losses are averaged before they are compared
TARGET = 0.005  # relative: how far the held-out loss of all three components may be off
ACROSS = "/across_nodes"

Point = tuple[int, float]  # iteration, value
Runs = Mapping[str, Mapping[int, dict]]  # variant -> seed -> result of the run


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant beside the baseline; differences are relative, within a seed.

    error: the standard error of the difference; 0 for one seed. bump: the largest difference of the
    smoothed training loss, averaged over seeds, and where. bits: of a weight and of a gradient in
    coded messages between nodes.
    """

    variant: str
    seeds: int
    first: float  # mean held-out loss before training, nats per token
    final: float  # the same at the end
    difference: float
    error: float
    worst: float  # the largest difference of one seed
    worst_seed: int
    bump: float
    bump_at: int  # iteration
    node_bytes: float  # sent by a node to other nodes per training step
    of_model: float  # the same in M, the bytes of the model in 16 bit
    bits: dict[str, float]
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A variant over the iterations, as means over the seeds; differences as in `Row`."""

    variant: str
    training: list[Point]
    held_out: list[Point]
    training_difference: list[Point]
    held_out_difference: list[Point]


def compare(runs: Runs) -> list[Row]:
    """A row for each variant, in the order of `runs`; all have the baseline's seeds."""
    return [_row(variant, of_seeds, runs[BASELINE]) for variant, of_seeds in runs.items()]


def curves(runs: Runs) -> list[Curves]:
    """The curves of each variant, in the order of `runs`."""
    return [_curves(variant, of_seeds, runs[BASELINE]) for variant, of_seeds in runs.items()]


def smoothed(losses: Sequence[float]) -> list[Point]:
    """Means over the last `WINDOW` iterations, or over all of a shorter run."""
    window = min(WINDOW, len(losses))
    ends = range(window, len(losses) + 1)
    return [(end, statistics.fmean(losses[end - window : end])) for end in ends]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    return columns_of(map(asdict, rows), *COLUMNS)


def verdict(rows: Sequence[Row]) -> str | None:
    """Whether all three components together reach the target; None if they were not trained."""
    for row in rows:
        if row.variant == "zeropp":
            reached = "within" if abs(row.difference) <= TARGET else "NOT within"
            return (
                f"All three: held-out loss {100 * row.difference:+.2f}% from the baseline's, "
                f"{reached} {100 * TARGET:g}%."
            )
    return None


def bits_lines(rows: Sequence[Row]) -> list[str]:
    """For each variant with coded messages, the bits that their numbers took."""
    return [
        f"{row.variant}: "
        + ", ".join(f"{bits:.2f} bits a {name}" for name, bits in row.bits.items())
        for row in rows
        if row.bits
    ]


def _unless_baseline(text: Callable[[dict], str]) -> Callable[[dict], str | None]:
    return lambda row: None if row["variant"] == BASELINE else text(row)


COLUMNS = (
    Column("", "variant"),
    Column("held-out loss", "final", ".4f"),
    Column(
        "to baseline",
        _unless_baseline(lambda row: f"{row['difference']:+.2%} ± {row['error']:.2%}"),
    ),
    Column(
        "worst seed", _unless_baseline(lambda row: f"{row['worst']:+.2%} ({row['worst_seed']})")
    ),
    Column("largest bump", _unless_baseline(lambda row: row["bump"]), "+.2%"),
    Column("at iteration", _unless_baseline(lambda row: row["bump_at"])),
    Column("MB across nodes", "node_bytes", ".2f", 1e-6),
    Column("in M", "of_model", ".3f"),
    Column("ms a step", "step_seconds", ".0f", 1e3),
)


def _row(variant: str, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> Row:
    finals = {
        seed: run["held_out"][-1][1] / baseline[seed]["held_out"][-1][1] - 1
        for seed, run in of_seeds.items()
    }
    worst_seed = max(finals, key=lambda seed: finals[seed])
    over_time = _curves(variant, of_seeds, baseline).training_difference
    bump_at, bump = max(over_time, key=lambda point: point[1])
    across = statistics.fmean(
        sum(sent for key, sent in run["node_bytes"].items() if key.endswith(ACROSS))
        for run in of_seeds.values()
    )
    error = statistics.stdev(finals.values()) / len(finals) ** 0.5 if len(finals) > 1 else 0.0
    any_run = next(iter(of_seeds.values()))
    return Row(
        variant=variant,
        seeds=len(of_seeds),
        first=statistics.fmean(run["held_out"][0][1] for run in of_seeds.values()),
        final=statistics.fmean(run["held_out"][-1][1] for run in of_seeds.values()),
        difference=statistics.fmean(finals.values()),
        error=error,
        worst=finals[worst_seed],
        worst_seed=worst_seed,
        bump=bump,
        bump_at=bump_at,
        node_bytes=across,
        of_model=across / (2 * any_run["parameters"]),
        bits=_mean_bits(of_seeds.values()),
        step_seconds=statistics.median(run["step_seconds"] for run in of_seeds.values()),
    )


def _mean_bits(runs: Iterable[dict]) -> dict[str, float]:
    of_runs = [run.get("bits", {}) for run in runs]
    names = dict.fromkeys(name for bits in of_runs for name in bits)
    return {name: statistics.fmean(bits[name] for bits in of_runs) for name in names}


def _curves(variant: str, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> Curves:
    assert of_seeds.keys() == baseline.keys() and variant in VARIANTS, (variant, of_seeds)
    training = [smoothed(run["training"]) for run in of_seeds.values()]
    held_out = [run["held_out"] for run in of_seeds.values()]
    peers = [baseline[seed] for seed in of_seeds]
    return Curves(
        variant=variant,
        training=_mean(training),
        held_out=_mean(held_out),
        training_difference=_mean_difference(
            training, [smoothed(peer["training"]) for peer in peers]
        ),
        held_out_difference=_mean_difference(held_out, [peer["held_out"] for peer in peers]),
    )


def _mean_difference(
    series: Sequence[Sequence[Point]], baselines: Sequence[Sequence[Point]]
) -> list[Point]:
    """Mean over the seeds of the relative differences from the baseline."""
    differences = []
    for points, baseline in zip(series, baselines, strict=True):
        pairs = zip(points, baseline, strict=True)
        differences.append([(at, value / right - 1) for (at, value), (_, right) in pairs])
    return _mean(differences)


def _mean(series: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of several series, point by point."""
    columns = zip(*series, strict=True)
    return [(column[0][0], statistics.fmean(value for _, value in column)) for column in columns]
