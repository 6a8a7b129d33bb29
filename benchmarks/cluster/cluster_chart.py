"""The chart of a run on an emulated cluster: step times at each rate, bytes between nodes."""

from pathlib import Path

from benchmarks.cluster.cluster_report import ACROSS, bytes_of, largest, rate_title
from benchmarks.shared.charts import hide_top_and_right, save_png

COLOURS = ("#555555", "#0072b2", "#56b4e9", "#f0e442", "#e69f00", "#cc3311", "#aa4499", "#009e73")
PANEL_WIDTH, BAR_HEIGHT, MARGIN = 3.6, 0.42, 1.5  # inches


def draw(result: dict, path: Path) -> None:
    """Write the PNG: a panel of medians (quartiles as whiskers) for each rate, and one of bytes."""
    from matplotlib.figure import Figure

    runs = result["runs"]
    height = MARGIN + BAR_HEIGHT * max(len(run["rows"]) for run in runs)
    figure = Figure(figsize=(PANEL_WIDTH * (len(runs) + 1), height), layout="constrained")
    panels = figure.subplots(1, len(runs) + 1, sharey=True, squeeze=False)[0]
    for panel, run in zip(panels, runs, strict=False):
        _times(panel, run)
    _bytes(panels[-1], runs[-1], 2 * result["parameters"])
    for panel in panels:
        panel.grid(axis="x", alpha=0.25)
        panel.set_axisbelow(True)
        hide_top_and_right(panel)
        panel.margins(x=0.28)
    panels[0].invert_yaxis()
    figure.suptitle(
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks, "
        f"{result['parameters'] / 1e6:.1f} M parameters",
        fontsize=11,
    )
    save_png(figure, path)


def _times(panel, run: dict) -> None:
    rows = run["rows"]
    names, medians = [row["name"] for row in rows], [row["median"] for row in rows]
    below = [row["median"] - row["quartiles"][0] for row in rows]
    above = [row["quartiles"][1] - row["median"] for row in rows]
    bars = panel.barh(names, medians, color=COLOURS[: len(rows)], xerr=(below, above))
    labels = [f"{row['median']:.2f} s ({row['speedup']:.2g} x)" for row in rows]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    panel.set_title(f"step time, {rate_title(run['rate'])}", fontsize=10)
    panel.set_xlabel("seconds, median and quartiles", fontsize=8)


def _bytes(panel, run: dict, model_bytes: int) -> None:
    """What the node that sends most sends: on the wire, else by the ledger; in units of M."""
    rows = run["rows"]
    sent = []
    for row in rows:
        wire = largest(node["sent"] for node in row["nodes"])
        ledger = largest(bytes_of(node["ledger"], ACROSS) for node in row["nodes"])
        sent.append(ledger if wire is None else wire)
    values = [(num_bytes or 0) / model_bytes for num_bytes in sent]
    bars = panel.barh([row["name"] for row in rows], values, color=COLOURS[: len(rows)])
    labels = [
        "not counted" if num_bytes is None else f"{num_bytes / model_bytes:.2f} M"
        for num_bytes in sent
    ]
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    source = "by the ledger" if run["link"] is None else "on the wire"
    panel.set_title("a node sends to others", fontsize=10)
    panel.set_xlabel(f"M per step, {source}", fontsize=8)
