"""Differences of the variants' losses from the baseline's, over time and at the end.

Runs of one seed see the same samples in the same order and start from the same weights. So every
difference is taken within a seed, relative to the baseline's loss, and only then averaged.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence.variants import BASELINE
from benchmarks.shared import table as tables

WINDOW = 20  # iterations over which training losses are averaged before they are compared
TARGET = 0.005  # relative: how far the held-out loss of all three components may be off
ACROSS = "/across_nodes"

Point = tuple[int, float]  # iteration, value
Runs = Mapping[str, Mapping[int, dict]]  # variant -> seed -> result of the run


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A variant over the iterations, as means over the seeds; differences as in `compare`."""

    variant: str
    training: list[Point]
    held_out: list[Point]
    training_difference: list[Point]
    held_out_difference: list[Point]


def compare(runs: Runs) -> list[dict]:
    """A row for each variant, in the order of `runs`; all have the baseline's seeds.

    first, final: mean held-out losses before training and at the end, nats per token. difference:
    of the latter from the baseline's, relative and within a seed; error: its standard error, 0 for
    one seed; worst: the largest one of a seed. bump: the largest difference of the smoothed
    training loss, averaged over seeds, and at which iteration. node_bytes: sent by a node to other
    nodes per training step; of_model: the same in M, the bytes of the model in 16 bit. bits: of a
    weight and of a gradient in coded messages between nodes.
    """
    over_time = curves(runs)
    return [_row(each, runs[each.variant], runs[BASELINE]) for each in over_time]


def curves(runs: Runs) -> list[Curves]:
    """The curves of each variant, in the order of `runs`."""
    return [_curves(variant, of_seeds, runs[BASELINE]) for variant, of_seeds in runs.items()]


def smoothed(losses: Sequence[float]) -> list[Point]:
    """Means over the last `WINDOW` iterations, or over all of a shorter run."""
    window = min(WINDOW, len(losses))
    ends = range(window, len(losses) + 1)
    return [(end, statistics.fmean(losses[end - window : end])) for end in ends]


def table(rows: Sequence[dict]) -> str:
    """The rows as a Markdown table."""
    return tables.table(rows, *COLUMNS)


def across_nodes(node_bytes: Mapping[str, float]) -> float:
    """The bytes of all purposes that a node sends to other nodes."""
    return sum(sent for key, sent in node_bytes.items() if key.endswith(ACROSS))


def verdict(rows: Sequence[dict]) -> str | None:
    """Whether all three components together reach the target; None if they were not trained."""
    for row in (each for each in rows if each["variant"] == "zeropp"):
        reached = "within" if abs(row["difference"]) <= TARGET else "NOT within"
        return (
            f"All three: held-out loss {100 * row['difference']:+.2f}% from the baseline's, "
            f"{reached} {100 * TARGET:g}%."
        )
    return None


def bits_lines(rows: Sequence[dict]) -> list[str]:
    """For each variant with coded messages, the bits that their numbers took."""
    texts = {
        row["variant"]: [f"{bits:.2f} bits a {name}" for name, bits in row["bits"].items()]
        for row in rows
    }
    return [f"{variant}: {', '.join(each)}" for variant, each in texts.items() if each]


def _but_baseline(value: Callable[[dict], object]) -> Callable[[dict], object]:
    return lambda row: None if row["variant"] == BASELINE else value(row)


COLUMNS = (
    tables.Column("", "variant"),
    tables.Column("held-out loss", "final", ".4f"),
    tables.Column("to baseline", _but_baseline("{difference:+.2%} ± {error:.2%}".format_map)),
    tables.Column("worst seed", _but_baseline("{worst:+.2%} ({worst_seed})".format_map)),
    tables.Column("largest bump", _but_baseline(lambda row: row["bump"]), "+.2%"),
    tables.Column("at iteration", _but_baseline(lambda row: row["bump_at"])),
    tables.Column("MB across nodes", "node_bytes", ".2f", 1e-6),
    tables.Column("in M", "of_model", ".3f"),
    tables.Column("ms a step", "step_seconds", ".0f", 1e3),
)


def _row(over_time: Curves, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> dict:
    runs = list(of_seeds.values())
    finals = {
        seed: run["held_out"][-1][1] / baseline[seed]["held_out"][-1][1] - 1
        for seed, run in of_seeds.items()
    }
    worst_seed = max(finals, key=finals.get)
    bump_at, bump = max(over_time.training_difference, key=lambda point: point[1])
    across = statistics.fmean(across_nodes(run["node_bytes"]) for run in runs)
    bits = [run.get("bits", {}) for run in runs]
    return {
        "variant": over_time.variant,
        "seeds": len(runs),
        "first": over_time.held_out[0][1],
        "final": over_time.held_out[-1][1],
        "difference": statistics.fmean(finals.values()),
        "error": statistics.stdev(finals.values()) / len(runs) ** 0.5 if len(runs) > 1 else 0.0,
        "worst": finals[worst_seed],
        "worst_seed": worst_seed,
        "bump": bump,
        "bump_at": bump_at,
        "node_bytes": across,
        "of_model": across / (2 * runs[0]["parameters"]),
        "bits": {name: statistics.fmean(each[name] for each in bits) for name in bits[0]},
        "step_seconds": statistics.median(run["step_seconds"] for run in runs),
    }


def _curves(variant: str, of_seeds: Mapping[int, dict], baseline: Mapping[int, dict]) -> Curves:
    training, held_out, training_difference, held_out_difference = [], [], [], []
    for seed, run in of_seeds.items():
        peer = baseline[seed]
        training.append(smoothed(run["training"]))
        held_out.append(run["held_out"])
        training_difference.append(_difference(training[-1], smoothed(peer["training"])))
        held_out_difference.append(_difference(run["held_out"], peer["held_out"]))
    return Curves(
        variant=variant,
        training=_mean(training),
        held_out=_mean(held_out),
        training_difference=_mean(training_difference),
        held_out_difference=_mean(held_out_difference),
    )


def _difference(points: Sequence[Point], baseline: Sequence[Point]) -> list[Point]:
    """Relative differences from the baseline, point by point."""
    pairs = zip(points, baseline, strict=True)
    return [(at, value / right - 1) for (at, value), (_, right) in pairs]


def _mean(series: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of several series, point by point."""
    columns = zip(*series, strict=True)
    return [(column[0][0], statistics.fmean(value for _, value in column)) for column in columns]
