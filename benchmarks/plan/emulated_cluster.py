"""The emulated cluster's rows: our collectives on CPUs, predicted from plain FSDP2's rows alone.

All ranks share two cores, so a rank's computing is that of all of them. Constants: the seconds that
a step of a run computes (one for each run, whose machine was busy in its own way), and processor
time for each byte that gloo copies (one for each machine). Both are fitted to FSDP2's rows, whose
calls block. Its reduce-scatter sends twice what a ring would (gloo).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from benchmarks.plan.bounded_fit import Bounds, fit
from benchmarks.plan.cells import CheckedSet, Prediction, log_squares, read_cells
from benchmarks.shared.zero_json import zero_json
from megatron_zpp.planner.planned_run import PlannedRun, plan_run
from megatron_zpp.planner.timing.links import Hop, Message
from megatron_zpp.planner.timing.messages import UnitMessages, unit_messages
from megatron_zpp.planner.timing.timeline import (
    Blocking,
    Collective,
    Host,
    UnitWork,
    step_seconds,
)
from megatron_zpp.settings.arguments import parse
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.route import Nodes

FSDP2 = "fsdp2"
ORDERED = (FSDP2, "zero3", "zeropp")
RANKS, PER_NODE, VOCABULARY = 4, 2, 512
MBIT = 1e6 / 8  # bytes per second
HEADERS = 1.011  # bytes on the wire to the ledger's, as the interfaces counted
GLOO_REDUCE_SCATTER = 2  # it is an all-reduce
PASSES = 3  # a forward pass, and a backward pass of twice its time
SHAPE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY - 1} --bf16"
)
COMPUTING = Bounds("computing, s", 0.05, 10, ("nothing computes faster", "longer than any step"))
COPYING = Bounds(
    "copying, ns a byte",
    0.05,
    2.0,
    ("20 GB/s, a core's memcpy", "0.5 GB/s, slower than gloo alone"),
)
TARGETS = (("step, s", 0.10, 0.15),)
Cell = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The units of a configuration with what they send."""

    run: PlannedRun
    messages: tuple[UnitMessages, ...]
    blocks: bool  # its collectives block

    def seconds(self, cell: Cell, computing: float, copying: float) -> float:
        """Return the seconds of a step."""
        rate = float(cell["rate_mbit"]) * MBIT if cell["rate_mbit"] else None
        num_micro_batches = int(cell["micro_batches"])
        forward = computing / num_micro_batches / PASSES / (len(self.messages) - 1)

        def collective(hops: Sequence[Message], factor: int = 1) -> Collective:
            timed, copied = [], 0.0
            for each in hops:
                per_node = each.near_bytes * PER_NODE + each.far_bytes
                copy = copying * 1e-9 * factor * per_node * (RANKS // PER_NODE)
                link = factor * each.far_bytes * HEADERS / rate if rate else 0.0
                timed.append(Hop(0.0, max(link, copy) if self.blocks else link + copy))
                copied += copy
            return Collective(tuple(timed), 0.0 if self.blocks else copied)

        reduces = GLOO_REDUCE_SCATTER if self.blocks else 1
        works = [
            UnitWork(
                forward=0.0 if is_root else forward,
                backward=0.0 if is_root else (PASSES - 1) * forward,
                first_gather=collective(unit.first_gather),
                later_gather=collective(unit.later_gather),
                backward_gather=collective(unit.backward_gather),
                reduction=collective(unit.reduction, reduces),
                early_reduction=collective(unit.early_reduction, reduces),
            )
            for unit, is_root in zip(
                self.messages, [False] * (len(self.messages) - 1) + [True], strict=True
            )
        ]
        kind = Blocking if self.blocks else Host
        return step_seconds(kind, works[:-1], works[-1], num_micro_batches)


def check() -> CheckedSet:
    """Return predicted beside measured of all rows."""
    texts, predictions = [], []
    by_machine = itertools.groupby(read_cells("emulated.tsv"), key=_machine)
    for machine, group in by_machine:
        cells = list(group)
        constants, text = _calibrated(cells)
        texts.append(f"{machine}: {text}")
        for cell in cells:
            copying, computing = constants[0], constants[1][cell["run"]]
            predicted = _work(*_key(cell)).seconds(cell, computing, copying)
            rate = f"{cell['rate_mbit']} Mbit/s" if cell["rate_mbit"] else "no limit"
            predictions.append(
                Prediction(
                    of=f"run {cell['run']}, {cell['seq']} tokens, {rate}, {cell['configuration']}",
                    quantity="step, s",
                    predicted=predicted,
                    measured=float(cell["step_ms"]) / 1000,
                    is_fitted=cell["configuration"] == FSDP2,
                )
            )
    return CheckedSet(
        name="emulated cluster", constants="; ".join(texts), predictions=tuple(predictions),
        targets=TARGETS,
    )  # fmt: skip


def wrong_orders(checked: CheckedSet) -> list[str]:
    """Return the rate-limited rows where FSDP2, ZeRO-3 and ZeRO++ are predicted in another order.

    Configurations beyond these differ by less than the quartiles of their steps.
    """
    rows: dict[str, list[Prediction]] = {}
    for each in checked.predictions:
        row, _, name = each.of.rpartition(", ")
        if name in ORDERED and "no limit" not in row:
            rows.setdefault(row, []).append(each)
    return [
        row
        for row, cells in rows.items()
        if [c.of for c in sorted(cells, key=lambda c: c.predicted)]
        != [c.of for c in sorted(cells, key=lambda c: c.measured)]
    ]


def _calibrated(cells: Sequence[Cell]) -> tuple[tuple[float, dict[str, float]], str]:
    """Return processor time a byte, and computing by run, from FSDP2's rows of a machine."""
    rows = [cell for cell in cells if cell["configuration"] == FSDP2]
    runs = list(dict.fromkeys(cell["run"] for cell in rows))

    def of_run(run: str, copying: float) -> tuple[tuple[float, ...], str, float]:
        own = [cell for cell in rows if cell["run"] == run]

        def loss(point: Sequence[float]) -> float:
            return log_squares(
                (_work(*_key(c)).seconds(c, point[0], copying), float(c["step_ms"]) / 1000)
                for c in own
            )

        constants, text = fit(loss, [COMPUTING])
        return constants, text, loss(constants)

    (copying,), text = fit(lambda point: sum(of_run(run, point[0])[2] for run in runs), [COPYING])
    fits = {run: of_run(run, copying) for run in runs}
    texts = [f"run {run} {fits[run][1]}" for run in runs]
    return (copying, {run: each[0][0] for run, each in fits.items()}), ", ".join([text, *texts])


def _machine(cell: Cell) -> str:
    return cell["machine"]


def _key(cell: Cell) -> tuple[str, int, int]:
    return cell["configuration"], int(cell["seq"]), int(cell["micro_batches"])


@cache
def _work(name: str, seq: int, micro_batches: int) -> Work:
    flags = f"{SHAPE} --seq-length {seq} --global-batch-size {RANKS * micro_batches}"
    config = parse(flags.split(), RANKS)
    settings = zero_json("zero3" if name == FSDP2 else name, PER_NODE)
    zero = ZeroConfig.from_json({"bf16": {"enabled": True}, **settings})
    nodes = Nodes.of(range(RANKS), PER_NODE)
    run = plan_run(replace(config, zero=zero), VOCABULARY, nodes, is_cpu=True)
    forecast = run.forecast.plain() if name == FSDP2 else run.forecast
    edges = [0, *accumulate(run.subunits)]
    messages = tuple(
        unit_messages(forecast, forecast.units[first:last], is_root=last == edges[-1])
        for first, last in pairwise(edges)
    )
    return Work(run=run, messages=messages, blocks=name == FSDP2)
