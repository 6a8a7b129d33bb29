"""Predicted beside measured, a point for each cell: fitted ones hollow, predicted ones filled."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan.cells import CheckedSet
from benchmarks.shared.charts import save_png

COLOURS = ("#4c8bf5", "#e8710a", "#34a853", "#a142f4", "#d93025", "#5f6368", "#00838f")
SIZE, DPI = (7.0, 6.2), 130  # inches, dots per inch
BAND = 0.15  # dotted lines


def draw(checked: Sequence[CheckedSet], path: Path) -> None:
    """Write the chart; each set is relative to its own unit, so both axes are logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=SIZE, dpi=DPI)
    for each, colour in zip(checked, COLOURS, strict=False):
        for is_fitted, label in ((True, None), (False, each.name)):
            chosen = [p for p in each.predictions if p.is_fitted is is_fitted]
            axes.scatter(
                [p.measured for p in chosen], [p.predicted for p in chosen], s=22, label=label,
                facecolors="none" if is_fitted else colour, edgecolors=colour, linewidths=0.9,
            )  # fmt: skip
    numbers = [n for each in checked for p in each.predictions for n in (p.measured, p.predicted)]
    ends = [min(numbers) / 1.3, max(numbers) * 1.3]
    for factor, style in ((1, "-"), (1 + BAND, ":"), (1 / (1 + BAND), ":")):
        axes.plot(ends, [factor * end for end in ends], style, color="#9aa0a6", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
    axes.set_title(f"Filled: predicted; hollow: fitted. Dotted: {BAND:.0%}", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save_png(figure, path)
