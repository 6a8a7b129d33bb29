"""A plan as a person reads it, and as JSON."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from megatron_zpp.planner.advice import (
    ALONE,
    about_alone,
    about_flags,
    advice,
    loss_of,
    not_compared,
    why_not,
)
from megatron_zpp.planner.candidates import SIZES
from megatron_zpp.planner.replicas import loss_change
from megatron_zpp.planner.search import ClusterPlan, Row
from megatron_zpp.planner.timing.hardware import GBIT, GIB

Columns = Mapping[str, Callable[[Row], str]]  # the text of a cell, by the title of its column
WIDTH = 100  # columns, where there is no terminal
SECONDS = MappingProxyType(  # in JSON: parts of `StepTime`
    {
        "step": "typical",
        **{each: each for each in ("fastest", "slowest", "computing", "bubble")},
        **{each: each for each in ("across_nodes", "in_node", "kernels")},
        "orthogonalizing": "optimizer",
    }
)
NOTES = (
    "places: configurations that differ by less than the error of a prediction share one, except "
    "those that leave 0.0 GiB; the advice is the most exact configuration of the first place",
    "fastest, slowest: the range of a step's seconds; MFU without recomputation, HFU with it",
    SIZES,
    "bubble: waiting for other stages; across, node: for links between and within nodes; kernels: "
    "quantizing",
    "left out: oversubscribed switches, stragglers, kernel launches, data loading, saving",
)


def print_plan(plan: ClusterPlan, top: int, console: Console | None = None) -> None:
    """Print the table of a plan, `top` configurations of it, and what it says."""
    console = console or _console()
    for name, text in subject(plan).items():
        console.print(f"{name:<11}{text}", soft_wrap=True)
    rows = [(_place(place), row) for place, row in best_of_settings(plan)]
    console.print(_table(CONFIGURATION, rows[:top]))
    if len(rows) > top:
        console.print(f"... {len(rows) - top} more: --top {len(rows)}")
    timed = [(place, row) for place, row in rows[:top] if row.time is not None]
    if timed:
        console.print("\nWhere the time of a step goes")
        console.print(_table(SHARES, timed))
    for line in not_compared(plan):
        console.print(line, soft_wrap=True)
    if plan.fitting and plan.cluster.num_nodes > 1 and len(plan.rows) > 1:
        _print_alone(plan, console)
    if timed and plan.row_of_flags.forecast.first.optimizer is not None:
        console.print(_optimizer_line(plan.config.optimizer.optimizer.title(), timed[0][1]))
    for note in NOTES:
        console.print(note)
    if plan.fitting:
        if not plan.row_of_flags.fits:
            console.print(f"\n{about_flags(plan)}", soft_wrap=True)
        best = plan.advised
        settings = best.candidate.settings
        console.print(f"\n{advice(plan)}", soft_wrap=True)
        words = shlex.join(_flags(best).split())  # a method may have a |
        console.print(f"flags: {words}", soft_wrap=True)
        if settings.zero:
            console.print(f"JSON: {json.dumps(settings.to_json())}", soft_wrap=True)


def _print_alone(plan: ClusterPlan, console: Console) -> None:
    """Print what replicas take, or why they are not offered."""
    console.print(f"\n{ALONE}")
    timed = [(str(row.candidate.interval), row) for row in plan.alone if row.time is not None]
    columns = {title: CONFIGURATION[title] for title in [*CONFIGURATION][:-2]}
    columns["times\nas fast"] = lambda row: f"{plan.best.time.typical / row.time.typical:.2g}"
    if timed:
        console.print(_table({**columns, "loss": loss_of}, timed))
    console.print(about_alone(plan))


def _optimizer_line(name: str, row: Row) -> str:
    """Say what the products and messages of an optimizer take of the first configuration."""
    time, sent = row.time, row.optimizer_in_m
    return (
        f"{name}: {time.optimizer:.3g} of the {time.typical:.3g} s of the first row, where a "
        f"node sends {sent['in_node']:.2f} M within and {sent['across_nodes']:.2f} M across"
    )


def subject(plan: ClusterPlan) -> dict[str, str]:
    """Return what is planned: the model, the batch, the cluster, and what its constants rest on."""
    model, cluster = plan.config.model, plan.cluster
    samples = plan.config.schedules.batch_size.final
    return {
        "model": f"{plan.row_of_flags.num_parameters / 1e9:.3g} billion parameters, "
        f"{model.num_layers} layers, hidden {model.hidden_size}, "
        f"sequences of {model.seq_length:,} tokens",
        "batch": f"{samples:,} sequences, {samples * model.seq_length:,} tokens a step",
        "cluster": f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} {cluster.gpu.name}, "
        f"{cluster.link_rate / GBIT:g} Gbit/s a node",
        "constants": cluster.basis,
    }


def plan_json(plan: ClusterPlan) -> dict[str, Any]:
    """Return everything that a plan found, for programs."""
    cluster, rows = plan.cluster, (*plan.rows, *plan.alone)
    return {
        "cluster": {
            "name": cluster.name,
            "gpu": cluster.gpu.name,
            "nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "link_gbit": cluster.link_rate / GBIT,
            "basis": cluster.basis,
        },
        "parameters": plan.row_of_flags.num_parameters,
        "advice": advice(plan) if plan.fitting else None,
        "best": rows.index(plan.advised) if plan.fitting else None,
        "not_compared": not_compared(plan),
        "flags_do_not_fit": None if plan.row_of_flags.fits else why_not(plan.row_of_flags),
        **({} if plan.crossing is None else plan.crossing.to_json()),
        "rows": [
            _row_json(
                row, plan.places[index] if index < len(plan.places) else None, cluster.num_ranks
            )
            for index, row in enumerate(rows)
        ],
    }


def best_of_settings(plan: ClusterPlan) -> Iterator[tuple[int | None, Row]]:
    """Yield the place and the first row of each setting of ZeRO, and of all sizes of axes.

    The row that is advised is among them. The place is None for one that does not fit.
    """
    best = plan.best if plan.fitting else None
    seen: set[object] = set()
    for index, row in enumerate(plan.rows):
        if not row.candidate.traits <= seen or row is best:
            seen |= row.candidate.traits
            yield (plan.places[index] if row.fits else None), row


def _table(columns: Columns, rows: Sequence[tuple[str, Row]]) -> Table:
    """A table of rows and their first cells; only the column of ZeRO's settings is wrapped.

    Of what does not fit, the first `OF_ANY` columns are shown.
    """
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("ZeRO")
    for title in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for first, row in rows:
        name, cells = row.candidate.settings.name, [*columns.values()]
        if row.time is None:
            name, cells = f"{name}: {why_not(row)}", cells[:OF_ANY]
        table.add_row(first, name, *(cell(row) for cell in cells))
    return table


def _place(place: int | None) -> str:
    return "-" if place is None else str(place)


def _share(part: str) -> Callable[[Row], str]:
    return lambda row: f"{max(0.0, getattr(row.time, part)) / row.time.typical:.0%}"


CONFIGURATION: Columns = MappingProxyType(
    {
        "T P C E": lambda row: row.candidate.short_sizes,
        "micro-\nbatch": lambda row: str(row.candidate.micro_batch),
        "recom-\nputed": lambda row: row.candidate.recomputed,
        "GiB a GPU\n(left)": lambda row: (
            f"{row.memory_bytes / GIB:.1f} ({(row.usable_bytes - row.memory_bytes) / GIB:.1f})"
        ),
        "across\nM": lambda row: f"{row.sent_in_m['across_nodes']:.2f}",
        "step\ns": lambda row: f"{row.time.typical:.3g}",
        "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
        "MFU": lambda row: f"{row.mfu:.0%}",
    }
)
OF_ANY = 3  # of these columns, those of what does not fit
SHARES: Columns = MappingProxyType(
    {
        "fastest\ns": lambda row: f"{row.time.fastest:.3g}",
        "slowest\ns": lambda row: f"{row.time.slowest:.3g}",
        "compute": _share("computing"),
        "bubble": _share("bubble"),
        "across": _share("across_nodes"),
        "node": _share("in_node"),
        "kernels": _share("kernels"),
        "in node\nM": lambda row: f"{row.sent_in_m['in_node']:.1f}",
        "HFU": lambda row: f"{row.hfu:.0%}",
    }
)


def _row_json(row: Row, place: int | None, num_ranks: int) -> dict[str, Any]:
    candidate, time = row.candidate, row.time
    result: dict[str, Any] = {
        "settings": candidate.settings.name,
        "flags": _flags(row),
        "json": candidate.settings.to_json(),
        "micro_batch": candidate.micro_batch,
        "recomputed": candidate.recomputed,
        "key": candidate.config.step_key(num_ranks),
        "place": place,
        "memory_bytes": dict(row.memory),
        "usable_bytes": row.usable_bytes,
        "sent_m": dict(row.sent_in_m),
        "optimizer_sent_m": dict(row.optimizer_in_m),
        **(_loss_json(row) if candidate.interval > 1 else {}),
    }
    if time is None:
        return result | {"why_not": why_not(row)}
    seconds = {f"{name}_s": getattr(time, part) for name, part in SECONDS.items()}
    rates = {name: getattr(row, name) for name in ("tokens_per_second", "mfu", "hfu")}
    return result | seconds | rates


def _loss_json(row: Row) -> dict[str, Any]:
    interval = row.candidate.interval
    change = loss_change(row.candidate.config.optimizer.optimizer, interval)
    loss = {"loss_percent": None}
    if change is not None:
        loss = {"loss_percent": [change.lowest, change.highest], "loss_source": change.source}
    return {"interval": interval, **loss}


def _flags(row: Row) -> str:
    """Return the flags that a configuration needs beside its JSON."""
    return " ".join(f"{name} {value}".strip() for name, value in row.candidate.flags.items())


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)
