"""The chart of a convergence comparison: the losses of all variants, and their differences."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.comparison import TARGET, WINDOW, Curves
from benchmarks.convergence.variants import BASELINE
from benchmarks.shared.charts import chart

COLOURS = (
    "#555555", "#0072b2", "#009e73", "#e69f00", "#cc3311", "#aa4499", "#56b4e9", "#999933",
    "#332288",
)  # fmt: skip
DASHES = ("solid", "dashed", "dotted")  # for each round of the colours


def draw(curves: Sequence[Curves], path: Path, title: str) -> None:
    """Write the PNG: losses above, differences to the baseline in percent below."""
    dots = {"marker": "o", "markersize": 4}
    settings = {"rows": 2, "sharex": True, "height_ratios": (3, 2)}
    with chart(path, (11.0, 7.5), **settings) as (figure, (losses, differences)):
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            line = {"color": colour, "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
            losses.plot(*_xy(curve.training), **line, linewidth=1.2, label=curve.variant)
            losses.plot(*_xy(curve.held_out), color=colour, linestyle="none", **dots)
            if curve.variant != BASELINE:
                training = _xy(curve.training_difference, 100)
                differences.plot(*training, **line, linewidth=1.0, alpha=0.65)
                held_out = _xy(curve.held_out_difference, 100)
                differences.plot(*held_out, **line, linewidth=1.6, **dots)
        losses.set_title(textwrap.fill(title, 100), fontsize=11)
        losses.set_ylabel("loss, nats per token")
        meaning = f"lines: training, mean of {WINDOW} iterations\ndots: held-out"
        figure.legend(title=meaning, frameon=False, loc="outside right upper")
        differences.axhspan(-100 * TARGET, 100 * TARGET, color="#808080", alpha=0.15, linewidth=0)
        differences.axhline(0, color=COLOURS[0], linewidth=1)
        differences.set_ylabel("to the baseline, %")
        differences.set_xlabel("iteration")


def _xy(points: Sequence[tuple[int, float]], factor: float = 1) -> tuple[list, list]:
    return [x for x, _ in points], [factor * y for _, y in points]
