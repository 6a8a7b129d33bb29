"""A plan as a picture: a stacked bar for each configuration, and step time against link rate."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import BinaryIO

from megatron_zpp.planner.plan_table import best_of_settings, subject
from megatron_zpp.planner.search import TIE, ClusterPlan, Row, Search
from megatron_zpp.planner.timing.hardware import GBIT
from zeropp.errors import InputError

PARTS = (  # attribute of StepTime, label, colour
    ("computing", "computing", "#4c8bf5"),
    ("bubble", "waiting for stages", "#9aa0a6"),
    ("kernels", "quantizing", "#34a853"),
    ("in_node", "waiting in the node", "#fbbc04"),
    ("across_nodes", "waiting across nodes", "#d93025"),
)
COLOURS = ("#5f6368", "#d93025", "#4c8bf5")
LOWEST_RATE, HIGHEST_RATE, POINTS = 1.0, 3200.0, 24  # Gbit/s of a node
DPI, MOST_BARS = 120, 16


def require_matplotlib() -> None:
    """Raise InputError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib (make setup has it)")


def draw(plan: ClusterPlan, search: Search, file: BinaryIO) -> None:
    """Write the picture of a plan of which something fits, as PNG."""
    import matplotlib  # noqa: PLC0415  (optional)

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    rows = [row for place, row in best_of_settings(plan) if place is not None]
    rows = [*rows[:MOST_BARS], *(row for row in plan.alone if row.time is not None)]
    figure, (bars, lines) = pyplot.subplots(
        2, 1, figsize=(9, 3.7 + 0.3 * len(rows)), dpi=DPI, height_ratios=[len(rows) + 2, 10]
    )
    _draw_bars(bars, rows)
    _draw_rates(lines, search, compared_rows(plan))
    texts = subject(plan)
    figure.suptitle(f"{texts['model']}\n{texts['cluster']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, format="png")
    pyplot.close(figure)


def compared_rows(plan: ClusterPlan) -> list[Row]:
    """Return the fastest configuration without quantization, the fastest with it, and replicas.

    These are the ones with the longest interval.
    """
    exact = (row for row in plan.fitting if not row.candidate.settings.inexactness)
    quantized = (row for row in plan.fitting if row.candidate.settings.inexactness)
    alone = (row for row in reversed(plan.alone) if row.time is not None)
    rows = next(exact, None), next(quantized, None), next(alone, None)
    return [row for row in rows if row is not None]


def crossing(
    rates: Sequence[float], exact: Sequence[float], other: Sequence[float]
) -> float | None:
    """Return the first rate from which on the other configuration is not faster by `TIE`."""
    for index, rate in enumerate(rates):
        if all(a <= b * (1 + TIE) for a, b in zip(exact[index:], other[index:], strict=True)):
            return rate if index else None
    return None


def _draw_bars(axes, rows: Sequence[Row]) -> None:
    names = [_label(row) for row in rows]
    left = [0.0] * len(rows)
    for attribute, label, colour in PARTS:
        widths = [max(0.0, getattr(row.time, attribute)) for row in rows]
        axes.barh(names, widths, left=left, label=label, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(
        fontsize=8, frameon=False, ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.4, 1.0)
    )
    axes.tick_params(labelsize=8)


def _draw_rates(axes, search: Search, rows: Sequence[Row]) -> None:
    ratio = (HIGHEST_RATE / LOWEST_RATE) ** (1 / (POINTS - 1))
    rates = [LOWEST_RATE * ratio**index for index in range(POINTS)]
    curves = []
    alone = [row.candidate.interval > 1 for row in rows]
    for row, colour in zip(rows, COLOURS, strict=False):
        seconds = [row.forecast.typical(search.cluster.with_link(rate)) for rate in rates]
        curves.append(seconds)
        axes.plot(rates, seconds, color=colour, label=_label(row))
    axes.axvline(
        search.cluster.link_rate / GBIT, color="#9aa0a6", linestyle=":", label="this cluster"
    )
    together = [curve for curve, is_alone in zip(curves, alone, strict=True) if not is_alone]
    if len(together) == 2 and (rate := crossing(rates, *together)) is not None:
        axes.axvline(
            rate,
            color="#34a853",
            linestyle="--",
            linewidth=0.9,
            label=f"from {rate:.0f} Gbit/s on quantizing does not pay",
        )
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s of a node", ylabel="seconds of a step")
    axes.legend(fontsize=8, frameon=False)


def _label(row: Row) -> str:
    tensor, pipe, context, _ = row.candidate.sizes
    sizes = {"tensor": tensor, "pipeline": pipe, "context": context}
    every = {"every": row.candidate.interval, **sizes}
    return ", ".join(
        [row.candidate.settings.name, *(f"{axis} {n}" for axis, n in every.items() if n > 1)]
    )
