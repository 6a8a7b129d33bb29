"""The picture of a comparison of convergence: the losses of all arms, how far they are apart."""

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.arms import BASELINE
from benchmarks.convergence.comparison import TARGET, WINDOW, Curves
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

COLOURS = ("#555555", "#0072b2", "#009e73", "#e69f00", "#cc3311", "#aa4499")
SIZE = (9.0, 7.5)  # inches
DOTS = 130  # per inch


def require_drawing(path: Path) -> None:
    """Raise InputError, before anything runs, if a picture could not be written there."""
    if path.suffix != ".png":
        raise InputError(f"--plot {path}: expected a name that ends with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib")


def draw(curves: Sequence[Curves], path: Path, title: str) -> None:
    """Write the PNG: losses above, differences to the baseline in percent below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for one, colour in zip(curves, COLOURS, strict=False):
        losses.plot(*_axes(one.training), color=colour, linewidth=1.2, label=one.arm)
        losses.plot(*_axes(one.held_out), color=colour, linestyle="none", marker="o", markersize=4)
        if one.arm == BASELINE:
            continue
        apart = _axes(one.training_difference, 100)
        differences.plot(*apart, color=colour, linewidth=1.0, alpha=0.65)
        apart = _axes(one.held_out_difference, 100)
        differences.plot(*apart, color=colour, marker="o", markersize=4, linewidth=1.6)
    losses.set_title(title, fontsize=11)
    losses.set_ylabel("loss, nats per token")
    losses.legend(
        title=f"lines: training, mean of {WINDOW} iterations\ndots: held-out", frameon=False
    )
    differences.axhspan(-100 * TARGET, 100 * TARGET, color="#808080", alpha=0.15, linewidth=0)
    differences.axhline(0, color=COLOURS[0], linewidth=1)
    differences.set_ylabel("to the baseline, %")
    differences.set_xlabel("iteration")
    for axes in (losses, differences):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS)
    write_atomically(path, lambda file: file.write(picture.getvalue()))


def _axes(points: Sequence[tuple[int, float]], factor: float = 1) -> tuple[list, list]:
    return [at for at, _ in points], [factor * value for _, value in points]
