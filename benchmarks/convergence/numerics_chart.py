"""Error of quantization against bytes per element: a curve for each code."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.numerics_report import is_zeropp
from benchmarks.shared.charts import hide_top_and_right, save_png

SIZE = (10.0, 4.4)  # inches
SERIES = (  # code, scale, label, colour
    ("signed", "bf16", "signed extreme, bf16 scale (used)", "#e8710a"),
    ("signed", "fp32", "signed extreme, fp32 scale", "#d6568f"),
    ("clipped", "bf16", "2 max / 2^b, clipped", "#a06be0"),
    ("half-step", "bf16", "half a step off", "#2ea36f"),
    ("symmetric", "bf16", "max / (2^(b-1) - 1), to nearest", "#4c8bf5"),
)


def draw(result: dict, path: Path) -> None:
    """Write the PNG: INT8 on weights and INT4 on gradients, as zeropp uses them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    for axes, bits, data in zip(
        figure.subplots(1, 2), (8, 4), ("weights", "gradients"), strict=True
    ):
        rows = [row for row in result["one_hop"] if row["bits"] == bits]
        axes.set_title(f"INT{bits}, on {data}", fontsize=11)
        axes.set(xscale="log", yscale="log", xlabel="bytes of the scales per element")
        axes.set_ylabel("error, %")
        for code, scale, label, colour in reversed(SERIES):
            curve = [row for row in rows if (row["code"], row["scale"]) == (code, scale)]
            _draw_curve(axes, sorted(curve, key=lambda row: row["bytes"]), data, label, colour)
        axes.grid(alpha=0.25)
        hide_top_and_right(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_png(figure, path)


def _draw_curve(axes, rows: Sequence[dict], data: str, label: str, colour: str) -> None:
    points = [(row["bytes"] - row["bits"] / 8, 100 * row["errors"][data]["error"]) for row in rows]
    axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
    for row, point in zip(rows, points, strict=True):
        if is_zeropp(row):
            axes.plot(*point, marker="o", markersize=10, fillstyle="none", color=colour)
            place = {"xytext": (-6, -14), "textcoords": "offset points", "ha": "right"}
            axes.annotate(f"blocks of {row['block']}", point, color=colour, **place)
