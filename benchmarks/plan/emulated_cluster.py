"""The emulated cluster's rows: our collectives on CPUs, predicted from plain FSDP2's rows alone.

All ranks share two cores, so a rank's computing is that of all of them. All constants come from
FSDP2's rows, whose calls block: the processor time of a byte that a limited link passes on in
packets (of a machine, from the processor seconds with and without a limit), of a byte that gloo
copies (of a machine), and the seconds that a step computes (of a run, as machines were busy in
their own ways). FSDP2's reduce-scatter sends twice what a ring would (gloo).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from operator import itemgetter

from benchmarks.plan.cells import (
    Bounds,
    Cell,
    CheckedSet,
    Prediction,
    fit,
    log_squares,
    read_cells,
)
from benchmarks.plan.cpu_steps import Blocking, Host
from benchmarks.shared.zero_json import zero_json
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.planner.run_forecast import RunForecast
from megatron_zpp.planner.step_work import Loads, unit_loads
from megatron_zpp.planner.timing.links import HopTime
from megatron_zpp.planner.timing.timeline import Collective, UnitWork, step_seconds
from megatron_zpp.settings.arguments import parse
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.rank_group import Nodes

FSDP2 = "fsdp2"
ORDERED = (FSDP2, "zero3", "zeropp")
QUIET, SHARED = "quiet machine", "shared machine"
RANKS, PER_NODE, VOCABULARY, CORES = 4, 2, 512, 2
NODES = RANKS // PER_NODE
MBIT = 1e6 / 8  # bytes per second
HEADERS = 1.011  # bytes on the wire to the ledger's, as the interfaces counted
GLOO_REDUCE_SCATTER = 2  # it is an all-reduce
SLICE = 1.4e-3  # s; Linux's scheduler on two cores: gloo's threads wait for computing ones so long
PASSES = 3  # a forward pass, and a backward pass of twice its time
SHAPE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCABULARY - 1} --bf16"
)
COMPUTING = Bounds("computing, s", 0.05, 10, ("nothing computes faster", "longer than any step"))
MEMCPY = "20 GB/s, a core's memcpy"
COPYING = Bounds("copying, ns a byte", 0.05, 2.0, (MEMCPY, "0.5 GB/s, slower than gloo alone"))
PACKETS = Bounds("packets, ns a byte", 0.05, 20.0, (MEMCPY, "180 us for a packet of 9000 bytes"))
TARGETS = (("step, s", 0.10, 0.15),)


@dataclass(frozen=True)
class ProcessorCost:
    """Nanoseconds of a core for a byte: copied by gloo, and passed to a limited link in packets."""

    copying: float
    packets: float

    def seconds(self, copied: float, limited: float) -> float:
        """Return the seconds of all cores for the bytes of all ranks."""
        return (copied * self.copying + limited * self.packets) * 1e-9 / CORES


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the units of a configuration send."""

    run: PlannedRun
    units: tuple[dict[str, Loads], ...]
    blocks: bool  # its collectives block

    def seconds(self, cell: Cell, computing: float, cost: ProcessorCost) -> float:
        """Return the seconds of a step."""
        num_micro_batches = int(cell["micro_batches"])
        forward = computing / num_micro_batches / PASSES / (len(self.units) - 1)
        reduces = GLOO_REDUCE_SCATTER if self.blocks else 1
        rate = float(cell["rate_mbit"]) * MBIT if cell["rate_mbit"] else None  # bytes per second

        works = [
            UnitWork(
                forward=each,
                backward=(PASSES - 1) * each,
                **{
                    name: self._collective(loads, reduces if "reduction" in name else 1, rate, cost)
                    for name, loads in unit.items()
                },
            )
            for unit, each in zip(
                self.units, [forward] * (len(self.units) - 1) + [0.0], strict=True
            )
        ]
        kind = Blocking if self.blocks else Host
        return step_seconds(lambda: kind(works[:-1], works[-1]), num_micro_batches)

    def _collective(
        self, hops: Loads, factor: int, rate: float | None, cost: ProcessorCost
    ) -> Collective:
        """Return a collective of `factor` times the bytes of `hops`.

        One that blocks has the cores to itself; one beside computation waits for a core at each
        of its hops, and takes the cores from computation.
        """
        timed, on_cores = [], 0.0
        for hop in hops:
            near, far = factor * hop.near_bytes, factor * hop.far_bytes
            copied = (near * PER_NODE + far) * NODES  # by gloo, all that ranks send
            cores = cost.seconds(copied, NODES * far if rate else 0.0)
            link = far * HEADERS / rate if rate else 0.0
            wait = 0.0 if self.blocks else SLICE * (hop.near_hops + hop.far_hops)
            timed.append(HopTime(0.0, max(link, cores) + wait))
            on_cores += cores
        return Collective(tuple(timed), 0.0 if self.blocks else on_cores)

    def limited_bytes(self, cell: Cell) -> float:
        """Return the bytes that all nodes send to others in a step of FSDP2."""
        more = int(cell["micro_batches"]) - 1
        return NODES * sum(
            times * hop.far_bytes
            for unit in self.units
            for name, times in (
                ("first_gather", 1),
                ("later_gather", more),
                ("backward_gather", more + 1),
                ("reduction", GLOO_REDUCE_SCATTER),
                ("early_reduction", GLOO_REDUCE_SCATTER * more),
            )
            for hop in unit[name]
        )


def check() -> list[CheckedSet]:
    """Return predicted beside measured, apart for runs beside which the machine did other work."""
    texts: list[str] = []
    predictions: dict[str, list[Prediction]] = {QUIET: [], SHARED: []}
    by_machine = itertools.groupby(read_cells("emulated.tsv"), key=itemgetter("machine"))
    for machine, group in by_machine:
        cells = list(group)
        cost, computing, text = _calibrated(cells)
        texts.append(f"{machine}: {text}")
        for cell in cells:
            rate = f"{cell['rate_mbit']} Mbit/s" if cell["rate_mbit"] else "no limit"
            of = f"run {cell['run']}, {cell['seq']} tokens, {rate}, {cell['configuration']}"
            seconds = _work_of(cell).seconds(cell, computing[cell["run"]], cost)
            is_fitted = cell["configuration"] == FSDP2
            row = Prediction(of, "step, s", seconds, _step_seconds(cell), is_fitted)
            predictions[cell["beside"]].append(row)
    return [
        CheckedSet(f"emulated cluster, {beside}", "; ".join(texts), tuple(rows), TARGETS)
        for beside, rows in predictions.items()
    ]


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


def _calibrated(cells: Sequence[Cell]) -> tuple[ProcessorCost, dict[str, float], str]:
    """Return a machine's costs, computing by run, and a line that says them."""
    rows = [cell for cell in cells if cell["configuration"] == FSDP2]
    runs = list(dict.fromkeys(cell["run"] for cell in rows))
    (packets,), packets_text = _packet_cost(rows)

    def of_run(run: str, copying: float) -> tuple[tuple[float, ...], str, float]:
        cost = ProcessorCost(copying, packets)
        waits = [  # a step that blocks computes and waits in turn
            (_work_of(row).seconds(row, 0.0, cost), _step_seconds(row))
            for row in rows
            if row["run"] == run
        ]

        def loss(point: Sequence[float]) -> float:
            return log_squares((point[0] + wait, measured) for wait, measured in waits)

        constants, text = fit(loss, [COMPUTING])
        return constants, text, loss(constants)

    (copying,), text = fit(lambda point: sum(of_run(run, point[0])[2] for run in runs), [COPYING])
    fits = {run: of_run(run, copying) for run in runs}
    texts = [packets_text, text, *(f"run {run} {fits[run][1]}" for run in runs)]
    computing = {run: constants[0] for run, (constants, *_) in fits.items()}
    return ProcessorCost(copying, packets), computing, ", ".join(texts)


def _packet_cost(rows: Sequence[Cell]) -> tuple[tuple[float, ...], str]:
    """Return what a limited link takes for a byte, by what a limit adds to processor seconds."""
    unlimited = {
        row["run"]: float(row["processor_s"])
        for row in rows
        if row["processor_s"] and not row["rate_mbit"]
    }
    added = [
        (_work_of(row).limited_bytes(row) * 1e-9, float(row["processor_s"]) - least)
        for row in rows
        if row["rate_mbit"] and (least := unlimited.get(row["run"])) is not None
    ]
    return fit(
        lambda point: sum((point[0] * billions - seconds) ** 2 for billions, seconds in added),
        [PACKETS],
    )


def _step_seconds(cell: Cell) -> float:
    return float(cell["step_ms"]) / 1000


def _work_of(cell: Cell) -> Work:
    return _work(cell["configuration"], int(cell["seq"]), int(cell["micro_batches"]))


@cache
def _work(name: str, seq: int, micro_batches: int) -> Work:
    flags = f"{SHAPE} --seq-length {seq} --global-batch-size {RANKS * micro_batches}"
    config = parse(flags.split(), RANKS)
    settings = zero_json("zero3" if name == FSDP2 else name, PER_NODE)
    zero = ZeroConfig.from_json({"bf16": {"enabled": True}, **settings})
    nodes = Nodes.of(range(RANKS), PER_NODE)
    run = RunForecast.of(replace(config, zero=zero), VOCABULARY, nodes, is_cpu=True).first
    plan = run.plan.plain() if name == FSDP2 else run.plan
    edges = [0, *accumulate(len(unit.parts) for unit in run.units)]
    units = tuple(unit_loads(plan, plan.units[first:last]) for first, last in pairwise(edges))
    return Work(run=run, units=units, blocks=name == FSDP2)
