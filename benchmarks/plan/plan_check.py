"""How far the predictions of `megatron-zpp plan` can be trusted: predicted beside measured.

    python -m benchmarks.plan.plan_check [--json FILE] [--plot FILE.png]

Cells are the ZeRO++ figures, SDP4Bit's table, published runs of FSDP and of Megatron-LM, and our
emulated cluster. What was fitted to is never averaged with what was predicted. Every fitted
constant has physical limits, and the table says which are at one. Nothing is trained, and no GPU is
needed.
"""

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.plan import emulated_cluster, megatron_runs, published_runs, sdp4bit, zeropp_figures
from benchmarks.plan.cells import CheckedSet, summary_rows
from benchmarks.plan.check_chart import draw
from benchmarks.shared.charts import require_matplotlib
from benchmarks.shared.result import begin, benchmark_parser, finish, heading, markdown_table

SETS = ("figures", "sdp4bit", "published", "megatron", "emulated")
SUMMARY = ("cells", "quantity", "", "number", "median error", "largest", "target")


def main() -> int:
    """Predict every cell, print the tables, write the files asked for."""
    options = read_options()
    logging.basicConfig(level=logging.ERROR)
    if options.plot is not None:
        require_matplotlib(options.plot)
    result = begin(__spec__.name)
    checked = [each for name in options.only or SETS for each in check(name)]
    result["sets"] = [as_json(each) for each in checked]
    result["wrong_orders"] = [
        row for each in checked if each.name.startswith("emulated cluster")
        for row in emulated_cluster.wrong_orders(each)
    ]  # fmt: skip
    result["left_out"] = dict(published_runs.left_out())
    finish(result, lambda result: print(tables(result, checked)), options.json)
    if options.plot is not None:
        draw([each for each in checked if not is_variant(each)], options.plot)
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SETS, help="some of the sets")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predicted and measured")
    return parser.parse_args()


def check(name: str) -> list[CheckedSet]:
    """Return the checked sets that go by a name."""
    if name == "figures":
        return [zeropp_figures.check(width) for width in zeropp_figures.WIDTHS]
    if name == "sdp4bit":
        return [sdp4bit.check(system) for system in sdp4bit.SYSTEMS]
    if name == "published":
        return [published_runs.check()]
    return [megatron_runs.check()] if name == "megatron" else emulated_cluster.check()


def is_variant(checked: CheckedSet) -> bool:
    """Whether a set is one that is shown already, at another unknown width."""
    widths = zeropp_figures.WIDTHS[1:]
    return any(checked.name.endswith(f"width {width}") for width in widths)


def tables(result: dict, checked: list[CheckedSet]) -> str:
    """Return the summary, the fitted constants and all cells, as Markdown."""
    parts = [heading(result), markdown_table(SUMMARY, summary_rows(checked))]
    parts.append("\n".join(f"- {each.name}: {each.constants}" for each in checked))
    if result["wrong_orders"]:
        parts.append("Predicted in another order: " + "; ".join(result["wrong_orders"]))
    counts = [f"{count} cells: {reason}" for reason, count in result["left_out"].items()]
    parts.append("Of the published runs these are not predicted: " + "; ".join(counts) + ".")
    for each in checked:
        cells = [
            (
                p.of, p.quantity, f"{p.predicted:.3g}", f"{p.measured:.3g}", f"{p.error:+.1%}",
                "fitted" if p.is_fitted else "",
            )
            for p in each.predictions
        ]  # fmt: skip
        columns = ("cell", "quantity", "predicted", "measured", "error", "")
        parts.append(f"## {each.name}\n\n{markdown_table(columns, cells)}")
    return "\n\n".join(parts)


def as_json(checked: CheckedSet) -> dict:
    """Return a set for the JSON."""
    return {
        "name": checked.name,
        "constants": checked.constants,
        "cells": [{**vars(each), "error": each.error} for each in checked.predictions],
    }


if __name__ == "__main__":
    sys.exit(main())
