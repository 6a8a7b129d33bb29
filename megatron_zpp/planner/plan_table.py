"""A plan as a person reads it, and as JSON."""

import json
from collections.abc import Iterator
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

from megatron_zpp.monitor.expected_step import settings_key
from megatron_zpp.planner.advice import advice, why_not
from megatron_zpp.planner.candidates import RECOMPUTED
from megatron_zpp.planner.search import Plan, Row
from megatron_zpp.planner.timing.hardware import GBIT, GIB
from megatron_zpp.settings.scheduled_values import Schedules

WIDTH = 180  # columns, where there is no terminal
NOTES = (
    "places: configurations that differ by less than the error of a prediction share one, except "
    "those that leave 0.0 GiB; the advice is the most exact configuration of the first place",
    "step: from the fast to the slow end of the constants; MFU without recomputation, HFU with it",
    "T P C: tensor, pipeline (x stages per rank) and context parallel sizes; bubble: seconds of "
    "waiting for other stages",
    "across, node: seconds of waiting for links between and within nodes; kernels: quantizing",
    "left out: oversubscribed switches, stragglers, kernel launches, data loading, saving",
)


def print_plan(plan: Plan, top: int, console: Console | None = None) -> None:
    """Print the table of a plan, `top` configurations of it, and what it says."""
    console = console or _console()
    config = plan.config
    model, cluster = config.model, plan.cluster
    samples = Schedules.of(config).batch_size.final
    for name, text in (
        (
            "model",
            f"{plan.row_of_flags.num_parameters / 1e9:.3g} billion parameters, "
            f"{model.num_layers} layers, hidden {model.hidden_size}, "
            f"sequences of {model.seq_length:,} tokens",
        ),
        ("batch", f"{samples:,} sequences, {samples * model.seq_length:,} tokens a step"),
        (
            "cluster",
            f"{cluster.num_nodes} nodes of {cluster.gpus_per_node} {cluster.gpu.name}, "
            f"{cluster.link_rate / GBIT:g} Gbit/s a node",
        ),
        ("constants", cluster.basis),
    ):
        console.print(f"{name:<11}{text}", soft_wrap=True)
    console.print(_table(plan, top))
    for note in NOTES:
        console.print(note, soft_wrap=True)
    if plan.fitting:
        best = plan.best
        settings = best.candidate.settings
        console.print(f"\n{advice(plan)}", soft_wrap=True)
        console.print(f"flags: {_flags(best)}", soft_wrap=True)
        if settings.zero:
            console.print(f"JSON: {json.dumps(settings.to_json())}", soft_wrap=True)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return everything that a plan found, for programs."""
    cluster = plan.cluster
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
        "best": plan.rows.index(plan.best) if plan.fitting else None,
        "rows": [
            _row_json(
                row, plan.places[index] if index < len(plan.places) else None, cluster.num_ranks
            )
            for index, row in enumerate(plan.rows)
        ],
    }


def best_of_settings(plan: Plan) -> Iterator[tuple[int | None, Row]]:
    """Yield the place and the first row of each setting of ZeRO, and of all sizes of axes.

    The row that is advised is among them. The place is None for one that does not fit.
    """
    best = plan.best if plan.fitting else None
    seen: set[object] = set()
    for index, row in enumerate(plan.rows):
        keys = {row.candidate.settings.name, row.candidate.sizes}
        if not keys <= seen or row is best:
            seen |= keys
            yield (plan.places[index] if row.fits else None), row


def _table(plan: Plan, top: int) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("", "ZeRO"):
        table.add_column(name)
    columns = (
        "T P C",
        "micro-\nbatch",
        "recom-\nputed",
        "GiB a GPU\n(left)",
        "across\nM",
        "in node\nM",
        "step, s",
        "tokens/s",
        "MFU\n(HFU)",
        "compute\ns",
        "bubble\ns",
        "across\ns",
        "node\ns",
        "kernels\ns",
    )
    for name in columns:
        table.add_column(name, justify="right")
    rows = list(best_of_settings(plan))
    for place, row in rows[:top]:
        table.add_row(*_cells(place, row))
    if len(rows) > top:
        table.add_row("", f"... {len(rows) - top} more: --top {len(rows)}")
    return table


def _cells(place: int | None, row: Row) -> list[str]:
    candidate, sent, time = row.candidate, row.sent_in_m, row.time
    cells = ["-" if place is None else str(place), candidate.settings.name]
    if time is None:
        text = f"{cells[1]}: {why_not(row)}"
        return [*cells[:1], text, _sizes(row), str(candidate.micro_batch), candidate.recomputed]
    left = (row.usable_bytes - row.memory_bytes) / GIB
    return [
        *cells,
        _sizes(row),
        str(candidate.micro_batch),
        candidate.recomputed,
        f"{row.memory_bytes / GIB:.1f} ({left:.1f})",
        f"{sent['across_nodes']:.2f}",
        f"{sent['in_node']:.1f}",
        f"{time.typical:.3g} ({time.fastest:.3g} to {time.slowest:.3g})",
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.0%} ({row.hfu:.0%})",
        *(
            f"{max(0.0, part):.2f}"
            for part in (
                time.computing,
                time.bubble,
                time.across_nodes,
                time.in_node,
                time.kernels,
            )
        ),
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
    }
    if time is None:
        return result | {"why_not": why_not(row)}
    return result | {
        "step_s": time.typical,
        "fastest_s": time.fastest,
        "slowest_s": time.slowest,
        "computing_s": time.computing,
        "bubble_s": time.bubble,
        "across_nodes_s": time.across_nodes,
        "in_node_s": time.in_node,
        "kernels_s": time.kernels,
        "tokens_per_second": row.tokens_per_second,
        "mfu": row.mfu,
        "hfu": row.hfu,
    }


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
        "--context-parallel-size": context if context > 1 else None,
        "--cp-comm-type": parallel.cp_comm_type if context > 1 else None,
    }
    words = [f"{name} {value}" for name, value in flags.items() if value is not None]
    if tensor > 1 and parallel.sequence_parallel:
        words.append("--sequence-parallel")
    return " ".join(words)


def _sizes(row: Row) -> str:
    tensor, pipe, context, chunks = row.candidate.sizes
    return f"{tensor} {pipe}{f'x{chunks}' if chunks > 1 else ''} {context}"


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)
