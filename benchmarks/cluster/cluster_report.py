"""What was measured on an emulated cluster, as numbers ready for JSON and as a table."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.cluster.emulation import INTERFACE, LOOPBACK
from benchmarks.cluster.turns import Turns
from benchmarks.shared.stopwatch import quartiles

ACROSS, INSIDE = "across_nodes", "in_node"
FAR_FROM_RATE = 0.1  # of the rate: a link that differs more is pointed out


def summary(
    turns: Mapping[str, Turns], built: Mapping[str, Sequence[dict]], ranks_per_node: int
) -> list[dict]:
    """A row for each configuration; bytes are means over its timed steps."""
    reference = statistics.median(next(iter(turns.values())).seconds)
    rows = []
    for name, one in turns.items():
        median = statistics.median(one.seconds)
        rows.append(
            {
                "name": name,
                "median": median,
                "quartiles": quartiles(one.seconds),
                "speedup": reference / median,
                "processor_seconds": statistics.median(one.work),
                "nodes": _nodes(one, ranks_per_node),
                "expected": _by_node([one["expected"] for one in built[name]], ranks_per_node),
                "first_loss": one.first_loss,
                "final_loss": one.losses[-1],
                "seconds": one.seconds,
                "losses": one.losses,
            }
        )
    return rows


def show(result: dict, console: Console) -> None:
    """Print a table for each rate."""
    machine, changed = result["machine"], " + changes" if result["uncommitted"] else ""
    million = result["parameters"] / 1e6
    console.print(
        f"{result['date']}  commit {result['commit']}{changed}\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; "
        f"torch {result['versions']['torch']}; load {result['load']['before']:.1f} before, "
        f"{result['load']['after']:.1f} after\n"
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks; {million:.1f} M parameters, "
        f"M = {2 * million:.1f} MB; " +
        ", ".join(f"{name} {value}" for name, value in result["shape"].items()) +
        f"; bf16 products in {result['products']}",
        highlight=False,
    )
    for run in result["runs"]:
        network = "one host, no network" if run["link"] is None else _link_words(run)
        console.print(f"\n[bold]{network}[/bold]", highlight=False)
        console.print(_times(run))
        console.print(
            "Bytes of a step, of the node with most: to and from other nodes on the wire, headers "
            "included; to other nodes and in the node by its ranks' ledgers",
            highlight=False,
        )
        console.print(_bytes(run, 2 * result["parameters"]))
        for line in _remarks(run):
            console.print(line, highlight=False)


def bytes_of(ledger: Mapping[str, float] | None, hop: str) -> float | None:
    """What a ledger says of one hop, all purposes together; None where there is no ledger."""
    if ledger is None:
        return None
    return sum(value for key, value in ledger.items() if key.endswith(f"/{hop}"))


def most(values: Iterable[float | None]) -> float | None:
    """The largest of the values that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def _nodes(one: Turns, ranks_per_node: int) -> list[dict]:
    """Of each node the bytes of a step: on the wire, by the ledger, and how far they are apart."""
    steps = len(one.seconds)
    ledgers = [_by_node(ranks, ranks_per_node) for ranks in one.sent]
    found = []
    for node in range(len(one.sent[0]) // ranks_per_node):
        row: dict = {"sent": None, "received": None, "in_node": None, "ledger": None}
        if one.wire[0]:
            wires = [step[node] for step in one.wire]
            row["sent"] = sum(wire[INTERFACE].sent for wire in wires) / steps
            row["received"] = sum(wire[INTERFACE].received for wire in wires) / steps
            row["in_node"] = sum(wire[LOOPBACK].sent for wire in wires) / steps
        if ledgers[0] is not None:
            keys = ledgers[0][node]
            row["ledger"] = {key: sum(each[node][key] for each in ledgers) / steps for key in keys}
        row["difference"] = _apart(row["sent"], bytes_of(row["ledger"], ACROSS))
        row["in_node_difference"] = _apart(row["in_node"], bytes_of(row["ledger"], INSIDE))
        found.append(row)
    return found


def _by_node(
    ranks: Sequence[Mapping[tuple[str, str], float] | None], ranks_per_node: int
) -> list[dict[str, float]] | None:
    """Bytes by "purpose/hop" of each node, from those of its ranks; None where nobody counts."""
    if ranks[0] is None:
        return None
    firsts = range(0, len(ranks), ranks_per_node)
    groups = [ranks[first : first + ranks_per_node] for first in firsts]
    return [
        {"/".join(key): sum(rank[key] for rank in group) for key in group[0]} for group in groups
    ]


def _apart(wire: float | None, ledger: float | None) -> float | None:
    """How much more the wire carried than the ledger says, as a part of the latter."""
    return wire / ledger - 1 if wire is not None and ledger else None


def _times(run: dict) -> Table:
    first = run["rows"][0]["name"]
    table = _empty("step, ms", "quartiles", f"{first} takes", "processor, s", "final loss")
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


def _bytes(run: dict, whole: int) -> Table:
    """Of the node with most; `whole` is M in bytes."""
    columns = ("sends\nM", "\nMB", "receives\nM", "ledger\nM", "\nMB", "wire\nto it", "in node\nM")
    table = _empty(*columns)
    for row in run["rows"]:
        nodes = row["nodes"]
        sent = most(node["sent"] for node in nodes)
        received = most(node["received"] for node in nodes)
        ledger = most(bytes_of(node["ledger"], ACROSS) for node in nodes)
        inside = most(bytes_of(node["ledger"], INSIDE) for node in nodes)
        table.add_row(
            row["name"],
            _in_models(sent, whole), _in_megabytes(sent),
            _in_models(received, whole),
            _in_models(ledger, whole), _in_megabytes(ledger),
            _farthest([node["difference"] for node in nodes]),
            _in_models(inside, whole),
        )
    return table


def _empty(*headings: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _link_words(run: dict) -> str:
    measured = " and ".join(f"{rate:.0f}" for rate in run["link"]["measured"])
    return f"rate {run['rate']}: one connection carries {measured} Mbit/s of payload, each way"


def _remarks(run: dict) -> list[str]:
    lines = []
    if run["link"] is not None:
        limit = run["link"]["limit"]
        slowest = min(run["link"]["measured"])
        if limit is not None and abs(slowest / limit - 1) > FAR_FROM_RATE:
            lines.append(f"The link is not what it should be: {slowest:.0f} of {limit:.0f} Mbit/s.")
    if run["dropped"]:
        lines.append(f"{run['dropped']} packets were dropped at the links and sent again.")
    return lines


def _in_models(num_bytes: float | None, whole: int) -> str:
    return "-" if num_bytes is None else f"{num_bytes / whole:.3f}"


def _in_megabytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _farthest(differences: Sequence[float | None]) -> str:
    known = [one for one in differences if one is not None]
    return f"{100 * max(known, key=abs):+.2f}%" if known else "-"
