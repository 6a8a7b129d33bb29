"""The measurements on an emulated cluster, as JSON and as tables."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.cluster.emulation import INTERFACE, LOOPBACK
from benchmarks.cluster.interleaved_steps import TimedSteps
from benchmarks.shared.interleaved import quartiles
from benchmarks.shared.result import heading

ACROSS, INSIDE = "across_nodes", "in_node"
RATE_TOLERANCE = 0.1  # a link whose measured rate differs by more is reported


def summary(
    timed: Mapping[str, TimedSteps], built: Mapping[str, Sequence[dict]], ranks_per_node: int
) -> list[dict]:
    """A row for each configuration; bytes are means over its timed steps.

    `built` holds the ranks' answers to the order `build`.
    """
    reference = statistics.median(next(iter(timed.values())).seconds)
    rows = []
    for name, steps in timed.items():
        median = statistics.median(steps.seconds)
        expected = [answer["expected"] for answer in built[name]]
        losses = [step.loss for step in steps.steps]
        rows.append(
            {
                "name": name,
                "median": median,
                "quartiles": quartiles(steps.seconds),
                "speedup": reference / median,
                "processor_seconds": statistics.median(
                    step.processor_seconds for step in steps.steps
                ),
                "nodes": _nodes(steps, ranks_per_node),
                "expected": _by_node(expected, ranks_per_node),
                "first_loss": steps.first_loss,
                "final_loss": losses[-1],
                "seconds": steps.seconds,
                "losses": losses,
            }
        )
    return rows


def show(result: dict, console: Console) -> None:
    """Print the tables of each rate."""
    million = result["parameters"] / 1e6
    shape = ", ".join(f"{name} {value}" for name, value in result["shape"].items())
    console.print(
        f"{heading(result, 'torch')}\n"
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks; {million:.1f} M parameters, "
        f"M = {2 * million:.1f} MB; {shape}; bf16 products in {result['products']}",
        highlight=False,
    )
    for run in result["runs"]:
        network = "one host, no network" if run["link"] is None else _link_title(run)
        console.print(f"\n[bold]{network}[/bold]", highlight=False)
        console.print(_times(run))
        console.print(
            "Bytes of a step, of the node with most: sent to and received from other nodes on the "
            "wire, with headers; sent to other nodes and within the node by its ranks' ledgers",
            highlight=False,
        )
        console.print(_bytes(run, 2 * result["parameters"]))
        for line in _remarks(run):
            console.print(line, highlight=False)


def bytes_of(ledger: Mapping[str, float] | None, hop: str) -> float | None:
    """A ledger's bytes of one hop for all purposes together; None where there is no ledger."""
    if ledger is None:
        return None
    return sum(value for key, value in ledger.items() if key.endswith(f"/{hop}"))


def largest(values: Iterable[float | None]) -> float | None:
    """The largest value that is not None; None where all are."""
    return max((value for value in values if value is not None), default=None)


def _nodes(timed: TimedSteps, ranks_per_node: int) -> list[dict]:
    """The bytes of a step of each node: on the wire, by the ledger, and their difference."""
    steps = timed.steps
    ledgers = [_by_node(step.sent, ranks_per_node) for step in steps]
    rows = []
    for node in range(len(steps[0].sent) // ranks_per_node):
        row: dict = {"sent": None, "received": None, "in_node": None, "ledger": None}
        if steps[0].wire:
            wires = [step.wire[node] for step in steps]
            row["sent"] = statistics.fmean(wire[INTERFACE].sent for wire in wires)
            row["received"] = statistics.fmean(wire[INTERFACE].received for wire in wires)
            row["in_node"] = statistics.fmean(wire[LOOPBACK].sent for wire in wires)
        if ledgers[0] is not None:
            row["ledger"] = {
                key: statistics.fmean(ledger[node][key] for ledger in ledgers)
                for key in ledgers[0][node]
            }
        row["difference"] = _excess(row["sent"], bytes_of(row["ledger"], ACROSS))
        row["in_node_difference"] = _excess(row["in_node"], bytes_of(row["ledger"], INSIDE))
        rows.append(row)
    return rows


def _by_node(
    ranks: Sequence[Mapping[tuple[str, str], float] | None], ranks_per_node: int
) -> list[dict[str, float]] | None:
    """Each node's bytes by "purpose/hop", summed over its ranks; None without a ledger."""
    if ranks[0] is None:
        return None
    firsts = range(0, len(ranks), ranks_per_node)
    groups = [ranks[first : first + ranks_per_node] for first in firsts]
    return [
        {"/".join(key): sum(rank[key] for rank in group) for key in group[0]} for group in groups
    ]


def _excess(wire: float | None, ledger: float | None) -> float | None:
    """How much more the wire carried than the ledger counted, relative to the ledger."""
    return wire / ledger - 1 if wire is not None and ledger else None


def _times(run: dict) -> Table:
    first = run["rows"][0]["name"]
    table = _table("step, ms", "quartiles", f"{first} takes", "processor, s", "final loss")
    for row in run["rows"]:
        low, high = row["quartiles"]
        table.add_row(
            row["name"],
            f"{1e3 * row['median']:.0f}",
            f"{1e3 * low:.0f} to {1e3 * high:.0f}",
            f"{row['speedup']:.2f} x",
            f"{row['processor_seconds']:.2f}",
            f"{row['final_loss']:.4f}",
        )
    return table


def _bytes(run: dict, model_bytes: int) -> Table:
    """Bytes of the node with most; `model_bytes` is M."""
    columns = ("sends\nM", "\nMB", "receives\nM", "ledger\nM", "\nMB", "wire\nto it", "in node\nM")
    table = _table(*columns)
    for row in run["rows"]:
        nodes = row["nodes"]
        sent = largest(node["sent"] for node in nodes)
        received = largest(node["received"] for node in nodes)
        ledger = largest(bytes_of(node["ledger"], ACROSS) for node in nodes)
        inside = largest(bytes_of(node["ledger"], INSIDE) for node in nodes)
        table.add_row(
            row["name"],
            _in_models(sent, model_bytes),
            _in_megabytes(sent),
            _in_models(received, model_bytes),
            _in_models(ledger, model_bytes),
            _in_megabytes(ledger),
            _farthest([node["difference"] for node in nodes]),
            _in_models(inside, model_bytes),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _link_title(run: dict) -> str:
    measured = " and ".join(f"{rate:.0f}" for rate in run["link"]["measured"])
    return f"rate {run['rate']}: one connection carries {measured} Mbit/s of payload, each way"


def _remarks(run: dict) -> list[str]:
    lines = []
    if run["link"] is not None:
        limit = run["link"]["limit"]
        slowest = min(run["link"]["measured"])
        if limit is not None and abs(slowest / limit - 1) > RATE_TOLERANCE:
            lines.append(f"The link is too slow or too fast: {slowest:.0f} of {limit:.0f} Mbit/s.")
    if run["dropped"]:
        lines.append(f"{run['dropped']} packets were dropped at the links and retransmitted.")
    return lines


def _in_models(num_bytes: float | None, model_bytes: int) -> str:
    return "-" if num_bytes is None else f"{num_bytes / model_bytes:.3f}"


def _in_megabytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _farthest(differences: Sequence[float | None]) -> str:
    numbers = [difference for difference in differences if difference is not None]
    return f"{100 * max(numbers, key=abs):+.2f}%" if numbers else "-"
