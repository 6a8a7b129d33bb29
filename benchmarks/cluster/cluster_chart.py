"""The picture of a run on an emulated cluster: step times at each rate, bytes between the nodes."""

import io
from pathlib import Path

from benchmarks.cluster.cluster_report import ACROSS, bytes_of, most
from zeropp.atomic import write_atomically

COLOURS = ("#555555", "#0072b2", "#56b4e9", "#f0e442", "#e69f00", "#cc3311", "#aa4499", "#009e73")
PANEL, LINE, MARGIN = 3.6, 0.42, 1.5  # inches: a panel's width; a bar's height; around the bars
DOTS = 130  # per inch


def draw(result: dict, path: Path) -> None:
    """Write the PNG: a panel of medians (quartiles as whiskers) for each rate, and one of bytes."""
    from matplotlib.figure import Figure

    runs = result["runs"]
    height = MARGIN + LINE * max(len(run["rows"]) for run in runs)
    figure = Figure(figsize=(PANEL * (len(runs) + 1), height), layout="constrained")
    panels = figure.subplots(1, len(runs) + 1, sharey=True, squeeze=False)[0]
    for panel, run in zip(panels, runs, strict=False):
        _times(panel, run)
    _bytes(panels[-1], runs[-1], 2 * result["parameters"])
    for panel in panels:
        panel.grid(axis="x", alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    figure.suptitle(
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks, "
        f"{result['parameters'] / 1e6:.1f} M parameters",
        fontsize=11,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS)
    write_atomically(path, lambda file: file.write(picture.getvalue()))


def _times(panel, run: dict) -> None:
    rows = run["rows"]
    names, medians = [row["name"] for row in rows], [row["median"] for row in rows]
    below = [row["median"] - row["quartiles"][0] for row in rows]
    above = [row["quartiles"][1] - row["median"] for row in rows]
    bars = panel.barh(names, medians, color=COLOURS[: len(rows)], xerr=(below, above))
    labels = [f"{row['median']:.2f} s ({row['speedup']:.2g} x)" for row in rows]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    limit = {None: "one host", "none": "no limit"}.get(run["rate"], run["rate"])
    panel.set_title(f"step time, {limit}", fontsize=10)
    panel.set_xlabel("seconds, median and quartiles", fontsize=8)


def _bytes(panel, run: dict, whole: int) -> None:
    """`whole` is M in bytes."""
    rows = run["rows"]
    wire = [most(node["sent"] for node in row["nodes"]) for row in rows]
    ledger = [most(bytes_of(node["ledger"], ACROSS) for node in row["nodes"]) for row in rows]
    shown = [a if a is not None else b for a, b in zip(wire, ledger, strict=True)]
    values = [(one or 0) / whole for one in shown]
    bars = panel.barh([row["name"] for row in rows], values, color=COLOURS[: len(rows)])
    labels = ["not counted" if one is None else f"{one / whole:.2f} M" for one in shown]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    counted = "by the ledger" if run["link"] is None else "on the wire"
    panel.set_title("a node sends to others", fontsize=10)
    panel.set_xlabel(f"M per step, {counted}", fontsize=8)
