"""How far the predictions of `megatron-zpp plan` can be trusted: predicted beside measured.

Cells are the ZeRO++ figures, SDP4Bit's table, published runs of FSDP and of Megatron-LM, and our
emulated cluster. What was fitted to is never averaged with what was predicted. Every fitted
constant has physical limits, and the table says which are at one. Nothing is trained, and no GPU is
needed.
"""

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.plan import (
    check_chart,
    emulated_cluster,
    published_runs,
    sdp4bit,
    zeropp_figures,
)
from benchmarks.plan.cells import CheckedSet, Prediction, summary_rows
from benchmarks.shared.benchmark import Benchmark, Flag
from benchmarks.shared.table import Column, markdown_table, table

SETS = ("figures", "sdp4bit", "published", "emulated")
SUMMARY = ("cells", "quantity", "", "number", "median error", "largest", "target")


def measure(options: argparse.Namespace, result: dict) -> None:
    """Predict every cell."""
    logging.basicConfig(level=logging.ERROR)
    checked = [each for name in options.only for each in check(name)]
    result["sets"] = [as_json(each) for each in checked]
    result["wrong_orders"] = [
        row for each in checked if each.name.startswith("emulated cluster")
        for row in emulated_cluster.wrong_orders(each)
    ]  # fmt: skip
    result["left_out"] = dict(published_runs.left_out())


def check(name: str) -> list[CheckedSet]:
    """Return the checked sets that go by a name."""
    if name == "figures":
        return [zeropp_figures.check(width) for width in zeropp_figures.WIDTHS]
    if name == "sdp4bit":
        return [sdp4bit.check(system) for system in sdp4bit.SYSTEMS]
    if name == "published":
        return published_runs.check()
    return emulated_cluster.check()


def is_variant(checked: CheckedSet) -> bool:
    """Whether a set is one that is shown already, at another unknown width."""
    widths = zeropp_figures.WIDTHS[1:]
    return any(checked.name.endswith(f"width {width}") for width in widths)


def as_json(checked: CheckedSet) -> dict:
    """Return a set for the JSON."""
    return {
        "name": checked.name,
        "constants": checked.constants,
        "targets": checked.targets,
        "cells": [{**vars(each), "error": each.error} for each in checked.predictions],
    }


def sets_of(result: dict) -> list[CheckedSet]:
    """Return the sets of a result."""
    return [
        CheckedSet(
            name=each["name"], constants=each["constants"], targets=each["targets"],
            predictions=tuple(Prediction.of_json(cell) for cell in each["cells"]),
        )
        for each in result["sets"]
    ]  # fmt: skip


def show(result: dict) -> str:
    """The summary, the fitted constants and all cells."""
    parts = [markdown_table(SUMMARY, summary_rows(sets_of(result)))]
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
    """Write a chart of the sets, without those at another unknown width."""
    check_chart.draw([each for each in sets_of(result) if not is_variant(each)], path)


OPTIONS = (Flag("--only", SETS, "some of the sets", choices=SETS),)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, draw=draw)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
