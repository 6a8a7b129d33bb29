"""Draws a chart with matplotlib as an SVG that takes its colours and its font from the page.

Every colour is one of `COLOURS`, and the SVG names it as a variable of the page's stylesheet, so
that one drawing serves a light and a dark page.
"""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_zpp.monitor.report.run_record import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "ink", "muted", "grid"
# Variables of the stylesheet, and the colours that stand for them while matplotlib draws.
COLOURS = MappingProxyType(
    {
        name: f"#0a0b{index:02x}"
        for index, name in enumerate(
            (INK, MUTED, GRID, "blue", "orange", "green", "violet", "teal", "gray"), start=16
        )
    }
)
WIDTH, HEIGHT, WIDE = 380, 216, 820  # units of an SVG, about pixels
LEFT = 38  # of the curves: what numbers beside the axis take
METADATA = ("Date", "Creator", "Format", "Type")  # are left out
MOST_POINTS = 400  # of a curve
STYLE = MappingProxyType(
    {
        "svg.fonttype": "none",  # text stays text, in the page's font
        "svg.hashsalt": "report",  # the same drawing has the same identifiers
        "font.size": 11,
        "axes.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.edgecolor": COLOURS[MUTED],
        "axes.axisbelow": True,
        "xtick.color": COLOURS[MUTED],
        "ytick.color": COLOURS[MUTED],
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "grid.color": COLOURS[GRID],
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.solid_joinstyle": "round",
        "path.simplify": True,
    }
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line over iterations. `dots` marks each point, `dashed` is for what was not measured."""

    label: str
    colour: str
    points: Sequence[Point]
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """Values between two levels, at all iterations, as a shaded stripe."""

    label: str
    colour: str
    low: float
    high: float


def draw_curves(
    curves: Sequence[Curve], *, band: Band | None = None, width: int = WIDTH, from_zero: bool = True
) -> str:
    """Return an SVG of curves over iterations, its scale from 0 if `from_zero`."""

    def paint(axes: "Axes") -> None:
        for curve in curves:
            _plot(axes, curve)
        if band is not None:
            axes.axhspan(band.low, band.high, color=COLOURS[band.colour], alpha=0.18, linewidth=0)
        _scale(axes, from_zero=from_zero)

    return _render(paint, width)


def draw_stack(layers: Sequence[Curve], total: Curve | None = None) -> str:
    """Return an SVG of areas on top of each other; `total` is a line to compare their sum with."""

    def paint(axes: "Axes") -> None:
        iterations, *_ = _thinned(layers[0].points)
        heights = [_thinned(layer.points)[1] for layer in layers]
        colours = [COLOURS[layer.colour] for layer in layers]
        axes.stackplot(iterations, *heights, colors=colours, linewidth=0, alpha=0.85)
        if total is not None:
            _plot(axes, total)
        _scale(axes, from_zero=True)

    return _render(paint, WIDTH)


def draw_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]], colours: Mapping[str, str], unit: str
) -> str:
    """Return an SVG of a horizontal bar for each row, made of the row's parts."""
    widest = max(sum(parts.values()) for _, parts in rows)

    def paint(axes: "Axes") -> None:
        for place, (name, parts) in enumerate(rows):
            left = 0.0
            for part, value in parts.items():
                axes.barh(place, value, left=left, height=0.4, color=COLOURS[colours[part]])
                left += value
            axes.text(0, place - 0.29, name, color=COLOURS[INK], va="bottom")
            amount = f"{left:.3g} {unit}"
            axes.text(left + widest * 0.015, place, amount, color=COLOURS[MUTED], va="center")
        axes.set_ylim(len(rows) - 0.7, -0.6)
        axes.set_xlim(0, widest * 1.24)
        axes.set_axis_off()
        axes.set_position((0, 0, 1, 1))

    return _render(paint, WIDTH)


def _render(paint: Callable[["Axes"], None], width: int) -> str:
    import matplotlib  # noqa: PLC0415  (optional)
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width / 72, HEIGHT / 72), frameon=False)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((LEFT / width, 0.1, 1 - (LEFT + 4) / width, 0.88), frameon=True)
        axes.patch.set_visible(False)
        paint(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(METADATA))
    return _inline(file.getvalue(), width)


def _scale(axes: "Axes", *, from_zero: bool) -> None:
    axes.margins(x=0.02, y=0.08)
    if from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.locator_params(axis="y", nbins=6, steps=(1, 2, 2.5, 5, 10))
    axes.locator_params(axis="x", nbins=5 if axes.figure.bbox.width <= WIDTH else 9, integer=True)
    axes.yaxis.set_major_formatter(_shown)
    axes.xaxis.set_major_formatter(_shown)


def _plot(axes: "Axes", curve: Curve) -> None:
    iterations, means, lows, highs = _thinned(curve.points)
    colour = COLOURS[curve.colour]
    axes.plot(
        iterations,
        means,
        color=colour,
        marker="o" if curve.dots or len(iterations) == 1 else None,
        markersize=4.5,
        linestyle=(0, (4, 3)) if curve.dashed else "solid",
        linewidth=1.4 if curve.dashed else None,
    )
    if lows is not means:
        axes.fill_between(iterations, lows, highs, color=colour, alpha=0.2, linewidth=0)


def _thinned(points: Sequence[Point]) -> tuple[Sequence[float], ...]:
    """Iterations, and the mean, the lowest and the highest value of as many points as fit."""
    iterations, values = [x for x, _ in points], [y for _, y in points]
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return iterations, values, values, values
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return (
        iterations[size - 1 :: size] + iterations[-1:] * bool(len(values) % size),
        [sum(group) / len(group) for group in groups],
        list(map(min, groups)),
        list(map(max, groups)),
    )


def _shown(value: float, _: object = None) -> str:
    """A number beside an axis: 0.003, 250, 1.5k, 20M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _inline(svg: str, width: int) -> str:
    """The SVG as part of an HTML page: own identifiers, variables for colours, no metadata."""
    left_out = r"^.*?<svg[^>]*>|<metadata>.*?</metadata>|<style.*?</style>"
    content = re.sub(left_out, "", svg, flags=re.S)
    prefix = hashlib.sha256(content.encode()).hexdigest()[:8]
    content = re.sub(r'<g id="[^"]*"/>|(?<=<g) id="[^"]*"', "", content)
    content = re.sub(r'(id="|#)([mp][0-9a-f]{10})', rf"\1c{prefix}\2", content)
    content = re.sub(r"font(-family)?: [^;\"]*;?", "", content).replace("xlink:href", "href")
    for name, colour in COLOURS.items():
        content = content.replace(colour, f"var(--{name})")
    return f'<svg viewBox="0 0 {width} {HEIGHT}">' + re.sub(r"\s*\n\s*", "\n", content)
