"""The chart of a run on an emulated cluster: step times at each rate, bytes between nodes."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.cluster_report import ACROSS, bytes_of, largest, rate_title
from benchmarks.shared.charts import chart

COLOURS = ("#555555", "#0072b2", "#56b4e9", "#f0e442", "#e69f00", "#cc3311", "#aa4499", "#009e73")
PANEL_WIDTH, BAR_HEIGHT, MARGIN = 3.6, 0.42, 1.5  # inches


def draw(result: dict, path: Path) -> None:
    """Write the PNG: a panel of medians (quartiles as whiskers) for each rate, and one of bytes."""
    runs, model_bytes = result["runs"], 2 * result["parameters"]
    height = MARGIN + BAR_HEIGHT * max(len(run["rows"]) for run in runs)
    size = PANEL_WIDTH * (len(runs) + 1), height
    with chart(path, size, len(runs) + 1, sharey=True) as (figure, panels):
        for panel, run in zip(panels, runs, strict=False):
            rows = run["rows"]
            medians = [row["median"] for row in rows]
            below = [row["median"] - row["quartiles"][0] for row in rows]
            above = [row["quartiles"][1] - row["median"] for row in rows]
            labels = [f"{row['median']:.2f} s ({row['speedup']:.2g} x)" for row in rows]
            _bars(panel, rows, medians, labels, xerr=(below, above))
            panel.set_title(f"step time, {rate_title(run['rate'])}", fontsize=10)
            panel.set_xlabel("seconds, median and quartiles", fontsize=8)
        sent = [_sent(row) for row in runs[-1]["rows"]]
        labels = ["not counted" if each is None else f"{each / model_bytes:.2f} M" for each in sent]
        _bars(panels[-1], runs[-1]["rows"], [(each or 0) / model_bytes for each in sent], labels)
        source = "by the ledger" if runs[-1]["link"] is None else "on the wire"
        panels[-1].set_title("a node sends to others", fontsize=10)
        panels[-1].set_xlabel(f"M per step, {source}", fontsize=8)
        panels[0].invert_yaxis()
        figure.suptitle(
            f"{result['nodes']} nodes x {result['ranks_per_node']} ranks, "
            f"{result['parameters'] / 1e6:.1f} M parameters",
            fontsize=11,
        )


def _bars(panel, rows: Sequence[dict], values: list[float], labels: list[str], **more) -> None:
    bars = panel.barh([row["name"] for row in rows], values, color=COLOURS[: len(rows)], **more)
    panel.bar_label(bars, labels, padding=4, fontsize=8)
    panel.grid(visible=False, axis="y")
    panel.margins(x=0.28)


def _sent(row: dict) -> float | None:
    """What the node that sends most sends: on the wire, else by the ledger."""
    wire = largest(node["sent"] for node in row["nodes"])
    return largest(bytes_of(n["ledger"], ACROSS) for n in row["nodes"]) if wire is None else wire
