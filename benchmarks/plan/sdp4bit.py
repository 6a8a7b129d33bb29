"""SDP4Bit's table 2: Megatron's distributed optimizer, and weights and gradients in 4 bits.

A step computes, exchanges activations of tensor parallelism in the node, waits for the pipeline,
and then sends gradients and weights once; nothing overlaps, as there is one micro-batch. Three
constants are fitted to the five baselines of a cluster: the rate of products of a wide model, the
share of a node's line rate that is reached, and what a single ring reaches of that, as one ring
does not fill several network cards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.plan.bounded_fit import Bounds, fit
from benchmarks.plan.cells import CheckedSet, Prediction, log_squares, read_cells
from megatron_zpp.planner.timing.hardware import (
    TERA,
    TYPICAL,
    Cluster,
    Description,
    Rates,
    find_cluster,
    hardware_table,
)
from megatron_zpp.planner.timing.links import Load, exchange, ring

VOCABULARY = 50257
GRADIENT_BYTES, WEIGHT_BYTES = 4, 2
# SDP4Bit: gradients 8 bits in the node, then 4 across; weights 4 bits, a scale for 128 of them.
CODE_BYTES = 0.5 * (1 + 4 / 64)
MOVES = 8  # sums of activations among tensor ranks in a layer: rings of an all-reduce, both passes
LINE_RATE = "less is no InfiniBand", "the line rate"
ONE_RING = "one of eight network cards is filled", "one ring fills all cards"
Cell = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class System:
    """One of the two clusters; link_gbit is what the line rate of a node is taken to be."""

    gpu: str
    table_gpu: str
    num_nodes: int
    per_node: int
    link_gbit: float
    peak: float
    best_share: float
    targets: tuple[tuple[str, float, float], ...]

    @property
    def cluster(self) -> Cluster:
        return find_cluster(
            Description(
                gpu=self.table_gpu,
                num_nodes=self.num_nodes,
                gpus_per_node=self.per_node,
                link=f"{self.link_gbit}gbit",
            )  # fmt: skip
        )

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        highest = self.peak * self.best_share
        why = "a fifth of the peak", f"{self.best_share:.0%} of the peak, the best known share"
        return (
            Bounds("products, TFLOP/s", 0.2 * self.peak, highest, why),
            Bounds("share of the line rate", 0.3, 1.0, LINE_RATE),
            Bounds("of which one ring", 0.1, 1.0, ONE_RING),
        )


SYSTEMS = (
    System(
        gpu="a100", table_gpu="a100-40gb", num_nodes=16, per_node=4, link_gbit=200, peak=312,
        best_share=0.87, targets=(("SDP4Bit TFLOPs", 0.15, 0.15),),
    ),
    System(
        gpu="h800", table_gpu="h800", num_nodes=16, per_node=8, link_gbit=400, peak=989.5,
        best_share=0.80, targets=(),
    ),
)  # fmt: skip


class Step:
    """A cell's step."""

    def __init__(self, cell: Cell, system: System) -> None:
        self.cell, self.system = cell, system
        self.hidden, self.layers = int(cell["hidden"]), int(cell["layers"])
        self.tensor, self.pipeline = int(cell["tp"]), int(cell["pp"])
        self.tokens = int(cell["seq"]) * int(cell["micro_batch"])
        self.weights = 12 * self.layers * self.hidden**2 + VOCABULARY * self.hidden
        ranks = int(cell["gpus"])
        self.replicas = ranks // self.tensor // self.pipeline
        self.in_node = max(1, system.per_node // self.tensor // self.pipeline)
        self.nodes = self.replicas // self.in_node

    @property
    def flops(self) -> float:
        """Operations of a step of one replica, without recomputation."""
        sequence = int(self.cell["seq"])
        more = sequence / 6 / self.hidden + VOCABULARY / 12 / self.layers / self.hidden
        return 72 * self.tokens * self.layers * self.hidden**2 * (1 + more)

    def tflops(self, products: float, share: float, one_ring: float) -> float:
        """Return the TFLOP/s of a GPU."""
        cluster = self.system.cluster
        is_one_ring = "baseline" in self.cell["note"] and self.tensor * self.pipeline == 1
        rates = replace(
            cluster.at(TYPICAL, torch.bfloat16), products=products * TERA,
            far=cluster.link_rate * share * (one_ring if is_one_ring else 1.0),
        )  # fmt: skip
        computing = self.flops / self.tensor / rates.products_at(self.hidden)
        seconds = computing + self._tensor_seconds(rates) + self._sending(rates)
        return self.flops / self.tensor / self.pipeline / seconds / TERA

    def _tensor_seconds(self, rates: Rates) -> float:
        if self.tensor == 1:
            return 0.0
        part = 2 * self.tokens * self.hidden * (self.tensor - 1) / self.tensor
        hop = ring(self.tensor, 1, part, 0.0).hop(rates)
        return MOVES * self.layers * hop.seconds

    def _sending(self, rates: Rates) -> float:
        per_rank = self.weights / self.tensor / self.pipeline
        # A node's replicas of a part form one ring; it has rings of several parts.
        rings = self.system.per_node / self.in_node
        across = (self.replicas - 1) / self.replicas
        if "baseline" in self.cell["note"]:
            passed = per_rank * across
            messages: Sequence[Load] = [
                ring(self.replicas, self.nodes, size * passed, size * passed * rings)
                for size in (GRADIENT_BYTES, WEIGHT_BYTES)
            ]
            kernels = 0.0
        else:
            near = per_rank * (self.in_node - 1) / self.in_node
            far = per_rank * rings * (self.nodes - 1) / self.nodes * CODE_BYTES
            messages = [
                exchange(2 * CODE_BYTES * near, 0.0),
                exchange(0.0, far),
                ring(self.nodes, self.nodes, 0.0, far),
                ring(self.in_node, 1, CODE_BYTES * near, 0.0),
            ]
            constants = hardware_table()["kernels"]
            touched = sum(
                constants[name]
                for name in ("dequantize_weights", "quantize_gradients", "sum_gradients")
            )
            kernels = touched * per_rank / rates.memory
        sent = [each.hop(rates).seconds for each in messages if not each.is_empty]
        return sum(sent) + kernels


def check(system: System) -> CheckedSet:
    """Return predicted beside measured on one of the clusters."""
    cells = [
        cell for cell in read_cells("public.tsv")
        if cell["source"].startswith("SDP4Bit") and cell["gpu"] == system.gpu
    ]  # fmt: skip
    baselines = [cell for cell in cells if "baseline" in cell["note"]]
    constants, text = fit(
        lambda point: log_squares(
            (Step(cell, system).tflops(*point), float(cell["tflops_gpu"])) for cell in baselines
        ),
        system.bounds,
    )
    predictions = tuple(
        Prediction(
            of=f"{cell['model']} on {cell['gpus']} {system.gpu}, TP {cell['tp']}, PP {cell['pp']}",
            quantity="baseline TFLOPs" if cell in baselines else "SDP4Bit TFLOPs",
            predicted=Step(cell, system).tflops(*constants),
            measured=float(cell["tflops_gpu"]),
            is_fitted=cell in baselines,
        )
        for cell in cells
    )
    return CheckedSet(
        name=f"SDP4Bit, {cells[0]['gpus']} {system.gpu}", constants=text, predictions=predictions,
        targets=system.targets,
    )  # fmt: skip
