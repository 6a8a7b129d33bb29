"""How far the predictions of `megatron-zpp plan` can be trusted: predicted beside measured.

Cells are the ZeRO++ figures, SDP4Bit's table, published runs of FSDP and of Megatron-LM, and our
emulated cluster. What was fitted to is never averaged with what was predicted. Every fitted
constant has physical limits, and the table says which are at one. Nothing is trained, and no GPU is
needed.
"""

import logging
import sys
from pathlib import Path

from benchmarks.plan import emulated_cluster, published_runs, sdp4bit, zeropp_figures
from benchmarks.plan.cells import CheckedSet, summary_rows
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.charts import chart
from benchmarks.shared.table import Column, markdown_table, table

SETS = {  # name -> returns its checked sets
    "figures": lambda: [zeropp_figures.check(width) for width in zeropp_figures.WIDTHS],
    "sdp4bit": lambda: [sdp4bit.check(system) for system in sdp4bit.SYSTEMS],
    "published": published_runs.check,
    "emulated": emulated_cluster.check,
}
SUMMARY = ("cells", "quantity", "", "number", "median error", "largest", "target")
COLOURS = ("#4c8bf5", "#e8710a", "#34a853", "#a142f4", "#d93025", "#5f6368", "#00838f")
BAND = 0.15  # dotted lines of the chart


def measure(options: Options, result: dict) -> None:
    """Predict every cell."""
    logging.basicConfig(level=logging.ERROR)
    checked = [each for name in options.only for each in SETS[name]()]
    result["sets"] = [as_json(each) for each in checked]
    emulated = [each for each in checked if each.name.startswith("emulated cluster")]
    result["wrong_orders"] = [
        row for each in emulated for row in emulated_cluster.wrong_orders(each)
    ]
    result["left_out"] = dict(published_runs.left_out())


def as_json(checked: CheckedSet) -> dict:
    """Return a set for the JSON."""
    cells = [{**vars(each), "error": each.error} for each in checked.predictions]
    settings = {name: getattr(checked, name) for name in ("name", "constants", "targets")}
    return {**settings, "cells": cells}


def show(result: dict) -> str:
    """The summary, the fitted constants and all cells."""
    parts = [markdown_table(SUMMARY, summary_rows(result["sets"]))]
    parts.append("\n".join(f"- {each['name']}: {each['constants']}" for each in result["sets"]))
    if result["wrong_orders"]:
        parts.append("Predicted in another order: " + "; ".join(result["wrong_orders"]))
    counts = [f"{count} cells: {reason}" for reason, count in result["left_out"].items()]
    parts.append("Of the published runs these are not predicted: " + "; ".join(counts) + ".")
    columns = (
        Column("cell", "of"),
        Column("quantity", "quantity"),
        Column("predicted", "predicted", ".3g"),
        Column("measured", "measured", ".3g"),
        Column("error", "error", "+.1%"),
        Column("", lambda cell: "fitted" if cell["is_fitted"] else ""),
    )
    parts += [f"## {each['name']}\n\n{table(each['cells'], *columns)}" for each in result["sets"]]
    return "\n\n".join(parts)


def draw(result: dict, path: Path) -> None:
    """Write the PNG: a point for each cell, fitted ones hollow, predicted ones filled.

    Sets at another unknown width are left out. Each is relative to its own unit, so both axes are
    logarithmic.
    """
    others = tuple(f"width {width}" for width in zeropp_figures.WIDTHS[1:])
    shown = [each for each in result["sets"] if not each["name"].endswith(others)]
    with chart(path, (7.0, 6.2)) as (_, (axes,)):
        numbers: list[float] = []
        for each, colour in zip(shown, COLOURS, strict=False):
            for is_fitted, label in ((True, None), (False, each["name"])):
                chosen = [cell for cell in each["cells"] if cell["is_fitted"] is is_fitted]
                real, said = ([cell[key] for cell in chosen] for key in ("measured", "predicted"))
                numbers += [*real, *said]
                axes.scatter(
                    real, said, s=22, label=label,
                    facecolors="none" if is_fitted else colour, edgecolors=colour, linewidths=0.9,
                )  # fmt: skip
        ends = [min(numbers) / 1.3, max(numbers) * 1.3]
        for factor, style in ((1, "-"), (1 + BAND, ":"), (1 / (1 + BAND), ":")):
            axes.plot(ends, [factor * end for end in ends], style, color="#9aa0a6", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
        axes.set_title(f"Filled: predicted; hollow: fitted. Dotted: {BAND:.0%}", fontsize=10)
        axes.legend(fontsize=8, frameon=False)


OPTIONS = (Flag("--only", tuple(SETS), "some of the sets", choices=tuple(SETS)),)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, draw=draw)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
