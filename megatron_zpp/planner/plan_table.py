"""A plan as a person reads it, and as JSON."""

import json
import shlex
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from megatron_zpp.monitor.expected_step import settings_key
from megatron_zpp.planner.advice import (
    ALONE,
    about_alone,
    about_flags,
    advice,
    loss_of,
    not_compared,
    why_not,
)
from megatron_zpp.planner.candidates import RECOMPUTED
from megatron_zpp.planner.replicas import loss_change
from megatron_zpp.planner.search import ClusterPlan, Row
from megatron_zpp.planner.timing.balanced_stages import stage_flags
from megatron_zpp.planner.timing.hardware import GBIT, GIB
from megatron_zpp.settings.scheduled_values import Schedules

WIDTH = 100  # columns, where there is no terminal
CONFIGURATION = (
    "T P C E",
    "micro-\nbatch",
    "recom-\nputed",
    "GiB a GPU\n(left)",
    "across\nM",
    "step\ns",
    "tokens/s",
    "MFU",
)
SHARES = (
    "fastest\ns",
    "slowest\ns",
    "compute",
    "bubble",
    "across",
    "node",
    "kernels",
    "in node\nM",
    "HFU",
)
SECONDS = MappingProxyType(  # in JSON: parts of `StepTime`
    {
        "step": "typical",
        **{each: each for each in ("fastest", "slowest", "computing", "bubble")},
        **{each: each for each in ("across_nodes", "in_node", "kernels")},
        "orthogonalizing": "optimizer",
    }
)
OF_REPLICAS = (*CONFIGURATION[:-2], "times\nas fast", "loss")
NOTES = (
    "places: configurations that differ by less than the error of a prediction share one, except "
    "those that leave 0.0 GiB; the advice is the most exact configuration of the first place",
    "fastest, slowest: the range of a step's seconds; MFU without recomputation, HFU with it",
    "T P C E: tensor, pipeline (x stages per rank), context and expert parallel sizes",
    "bubble: waiting for other stages; across, node: for links between and within nodes; kernels: "
    "quantizing",
    "left out: oversubscribed switches, stragglers, kernel launches, data loading, saving",
)


def print_plan(plan: ClusterPlan, top: int, console: Console | None = None) -> None:
    """Print the table of a plan, `top` configurations of it, and what it says."""
    console = console or _console()
    for name, text in subject(plan).items():
        console.print(f"{name:<11}{text}", soft_wrap=True)
    rows = list(best_of_settings(plan))
    console.print(_table(CONFIGURATION, [_configuration_cells(*row) for row in rows[:top]]))
    if len(rows) > top:
        console.print(f"... {len(rows) - top} more: --top {len(rows)}")
    timed = [(place, row) for place, row in rows[:top] if row.time is not None]
    if timed:
        console.print("\nWhere the time of a step goes")
        console.print(_table(SHARES, [_share_cells(*row) for row in timed]))
    for line in not_compared(plan):
        console.print(line, soft_wrap=True)
    if plan.fitting and plan.cluster.num_nodes > 1 and len(plan.rows) > 1:
        _print_alone(plan, console)
    if timed and plan.row_of_flags.work.run.optimizer is not None:
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
    """Print what nodes that step alone take, or why they are not offered."""
    console.print(f"\n{ALONE}")
    timed = [row for row in plan.alone if row.time is not None]
    if timed:
        console.print(_table(OF_REPLICAS, [_cells_alone(row, plan.best) for row in timed]))
    console.print(about_alone(plan))


def _cells_alone(row: Row, best: Row) -> list[str]:
    times = best.time.typical / row.time.typical
    _, *cells = _configuration_cells(None, row)
    return [str(row.candidate.interval), *cells[:-2], f"{times:.2g}", loss_of(row)]


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
    samples = Schedules.of(plan.config).batch_size.final
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
        **({"experts_or_tokens": plan.crossing.to_json()} if plan.crossing else {}),
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
        candidate = row.candidate
        keys = {candidate.settings.name, candidate.sizes, ("experts", candidate.expert_ranks)}
        if not keys <= seen or row is best:
            seen |= keys
            yield (plan.places[index] if row.fits else None), row


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of which only the second column, the settings of ZeRO, is wrapped."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column("ZeRO")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _configuration_cells(place: int | None, row: Row) -> list[str]:
    candidate, sent, time = row.candidate, row.sent_in_m, row.time
    first = "-" if place is None else str(place)
    sizes = [_sizes(row), str(candidate.micro_batch), candidate.recomputed]
    if time is None:
        return [first, f"{candidate.settings.name}: {why_not(row)}", *sizes]
    left = (row.usable_bytes - row.memory_bytes) / GIB
    return [
        first,
        candidate.settings.name,
        *sizes,
        f"{row.memory_bytes / GIB:.1f} ({left:.1f})",
        f"{sent['across_nodes']:.2f}",
        f"{time.typical:.3g}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.0%}",
    ]


def _share_cells(place: int | None, row: Row) -> list[str]:
    time = row.time
    parts = (time.computing, time.bubble, time.across_nodes, time.in_node, time.kernels)
    return [
        "-" if place is None else str(place),
        row.candidate.settings.name,
        f"{time.fastest:.3g}",
        f"{time.slowest:.3g}",
        *(f"{max(0.0, part) / time.typical:.0%}" for part in parts),
        f"{row.sent_in_m['in_node']:.1f}",
        f"{row.hfu:.0%}",
    ]


def _row_json(row: Row, place: int | None, num_ranks: int) -> dict[str, Any]:
    candidate, time = row.candidate, row.time
    result: dict[str, Any] = {
        "settings": candidate.settings.name,
        "flags": _flags(row),
        "json": candidate.settings.to_json(),
        "micro_batch": candidate.micro_batch,
        "recomputed": candidate.recomputed,
        "key": settings_key(candidate.config, num_ranks),
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
    granularity = RECOMPUTED[row.candidate.recomputed]
    tensor, pipe, context, chunks = row.candidate.sizes
    parallel = row.candidate.config.parallel
    flags = {
        "--micro-batch-size": row.candidate.micro_batch,
        "--recompute-granularity": granularity,
        "--tensor-model-parallel-size": tensor if tensor > 1 else None,
        "--pipeline-model-parallel-size": pipe if pipe > 1 else None,
        "--num-virtual-stages-per-pipeline-rank": chunks if chunks > 1 else None,
        **(stage_flags(parallel) if pipe > 1 else {}),
        "--context-parallel-size": context if context > 1 else None,
        "--expert-model-parallel-size": row.candidate.expert_ranks,
        "--cp-comm-type": parallel.cp_comm_type if context > 1 else None,
    }
    words = [f"{name} {value}" for name, value in flags.items() if value is not None]
    if tensor > 1 and parallel.sequence_parallel:
        words.append("--sequence-parallel")
    return " ".join(words)


def _sizes(row: Row) -> str:
    tensor, pipe, context, chunks = row.candidate.sizes
    experts = row.candidate.expert_ranks or 1
    return f"{tensor} {pipe}{f'x{chunks}' if chunks > 1 else ''} {context} {experts}"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)
