"""The measurements on an emulated cluster, as JSON and as tables."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.cluster.interleaved_steps import TimedStep, TimedSteps
from benchmarks.cluster.network.emulation import INTERFACE, LOOPBACK
from benchmarks.shared.benchmark import shape_text
from benchmarks.shared.interleaved import median_interval, quartiles
from benchmarks.shared.table import Column, Row, table

ACROSS, INSIDE = "across_nodes", "in_node"
RATE_TOLERANCE = 0.1  # a link whose measured rate differs by more is reported


def summary(
    timed: Mapping[str, TimedSteps], built: Mapping[str, Sequence[dict]], ranks_per_node: int
) -> list[dict]:
    """A row for each configuration; bytes are means over its timed steps.

    `built` holds the ranks' answers to the order `build`.
    """
    first = next(iter(timed.values())).seconds
    reference = statistics.median(first)
    rows = []
    for name, steps in timed.items():
        median = statistics.median(steps.seconds)
        losses = [step.loss for step in steps.steps]
        processor = [step.processor_seconds for step in steps.steps]
        pairs = [other / own for other, own in zip(first, steps.seconds, strict=True)]
        rows.append(
            {
                "name": name,
                "median": median,
                "quartiles": quartiles(steps.seconds),
                "speedup": reference / median,
                "paired": statistics.median(pairs),
                "interval": median_interval(pairs),
                "processor_seconds": statistics.median(processor),
                "nodes": _nodes(steps, ranks_per_node),
                "expected": _by_node([each["expected"] for each in built[name]], ranks_per_node),
                "held_bytes": built[name][0].get("held", 0),
                "first_loss": steps.first.loss,
                "final_loss": losses[-1],
                "seconds": steps.seconds,
                "losses": losses,
                **_first_and_later(steps),
            }
        )
    return rows


def show(result: dict) -> str:
    """The tables of each rate."""
    million, model_bytes = result["parameters"] / 1e6, 2 * result["parameters"]
    distance = f", {result['round_trip']} ms from node to node and back"
    parts = [
        f"{result['nodes']} nodes x {result['ranks_per_node']} ranks; {million:.1f} M parameters, "
        f"M = {2 * million:.1f} MB; {shape_text(result)}; bf16 products in {result['products']}; "
        f"{result['warm_up']} steps before the timed ones{distance * bool(result['round_trip'])}"
    ]
    for run in result["runs"]:
        rows = run["rows"]
        parts += [_link_title(run), table(rows, *_time_columns(rows[0]["name"]))]
        parts.append(
            "Bytes of a step, of the node with most: sent to and received from other nodes on the "
            "wire, with headers; sent to other nodes and within the node by its ranks' ledgers"
        )
        parts.append(table(rows, *_byte_columns(1 / model_bytes)))
        if any(row["later_pass"] is not None for row in rows):
            parts.append("What the first node sends to others, on the wire, and holds")
            parts.append(table(rows, *_pass_columns(1 / model_bytes)))
        parts += _remarks(run)
    return "\n\n".join(parts)


def rate_title(rate: str | None) -> str:
    """For example 200 Mbit/s; "one host" without a network."""
    if rate is None:
        return "one host"
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s").replace("none", "no limit")


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


def _first_and_later(timed: TimedSteps) -> dict:
    """Bytes that the first node sends in the first and in a later step and pass, and seconds."""

    def sent(step: TimedStep) -> int:
        return step.wire[0][INTERFACE].sent

    steps, passes, wired = timed.steps, timed.passes, bool(timed.first.wire)
    later = passes[1:] or passes
    seconds = [each.seconds for each in passes]
    return {
        "first_step": sent(timed.first) if wired else None,
        "later_step": statistics.fmean(map(sent, steps)) if wired else None,
        "first_pass": sent(passes[0]) if wired and passes else None,
        "later_pass": statistics.fmean(map(sent, later)) if wired and passes else None,
        "pass_seconds": statistics.median(seconds) if passes else None,
    }


def _time_columns(reference: str) -> list[Column]:
    return [
        Column("", "name"),
        Column("step, ms", "median", ".0f", 1e3),
        Column("quartiles", "quartiles", ".0f", 1e3),
        Column(f"{reference} takes, x", "speedup", ".2f"),
        Column("in pairs", "paired", ".3f"),
        Column("95%", "interval", ".3f"),
        Column("processor, s", "processor_seconds", ".2f"),
        Column("final loss", "final_loss", ".4f"),
    ]


def _byte_columns(in_models: float) -> list[Column]:
    """Bytes of the node with most; `in_models` is 1 / M."""
    sent, received = (_most(lambda node, n=name: node[n]) for name in ("sent", "received"))
    across, inside = (
        _most(lambda node, hop=hop: bytes_of(node["ledger"], hop)) for hop in (ACROSS, INSIDE)
    )
    return [
        Column("", "name"),
        Column("sends, M", sent, ".3f", in_models),
        Column("MB", sent, ".1f", 1e-6),
        Column("receives, M", received, ".3f", in_models),
        Column("ledger, M", across, ".3f", in_models),
        Column("MB", across, ".1f", 1e-6),
        Column("wire to it", _farthest, "+.2%"),
        Column("in node, M", inside, ".3f", in_models),
    ]


def _pass_columns(in_models: float) -> list[Column]:
    names = ("first_step", "later_step", "first_pass", "later_pass")
    sent = [Column(f"{name.replace('_', ' ')}, M", name, ".4f", in_models) for name in names]
    return [
        Column("", "name"),
        *sent,
        Column("pass, ms", "pass_seconds", ".0f", 1e3),
        Column("a rank's frozen matrices, MB", "held_bytes", ".2f", 1e-6),
    ]


def _most(number: Callable[[dict], float | None]) -> Callable[[Row], float | None]:
    """A function of a row: the largest number of any node."""
    return lambda row: largest(map(number, row["nodes"]))


def _farthest(row: Row) -> float | None:
    """How far a node's wire is from its ledger at most, relatively."""
    differences = [node["difference"] for node in row["nodes"] if node["difference"] is not None]
    return max(differences, key=abs, default=None)


def _link_title(run: dict) -> str:
    if run["link"] is None:
        return "one host, no network"
    measured = " and ".join(f"{rate:.0f}" for rate in run["link"]["measured"])
    return f"rate {run['rate']}: one connection carries {measured} Mbit/s of payload, each way"


def _remarks(run: dict) -> list[str]:
    lines = []
    if run["link"] is not None:
        limit, slowest = run["link"]["limit"], min(run["link"]["measured"])
        if limit is not None and abs(slowest / limit - 1) > RATE_TOLERANCE:
            lines.append(f"The link is too slow or too fast: {slowest:.0f} of {limit:.0f} Mbit/s.")
    if run["dropped"]:
        lines.append(f"{run['dropped']} packets were dropped at the links and retransmitted.")
    return lines
