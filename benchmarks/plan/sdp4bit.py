"""SDP4Bit's table 2: Megatron's distributed optimizer, and weights and gradients in 4 bits.

A step computes, exchanges activations of tensor parallelism in the node, waits for the pipeline,
and then sends gradients and weights once; nothing overlaps, as there is one micro-batch. Three
constants are fitted to the five baselines of a cluster: the rate of products of a wide model, the
share of a node's line rate that is reached, and what a single ring reaches of that, as one ring
does not fill several network cards.
"""

from dataclasses import dataclass, replace

import torch

from benchmarks.plan.cells import (
    Bounds,
    Cell,
    CheckedSet,
    Prediction,
    fit,
    log_squares,
    read_cells,
)
from megatron_zpp.planner.timing.hardware import (
    TERA,
    TYPICAL,
    Cluster,
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
KERNELS = ("dequantize_weights", "quantize_gradients", "sum_gradients")


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
        link = f"{self.link_gbit}gbit"
        sizes = {"num_nodes": self.num_nodes, "gpus_per_node": self.per_node}
        return find_cluster(gpu=self.table_gpu, link=link, **sizes)

    @property
    def bounds(self) -> tuple[Bounds, ...]:
        why = "a fifth of the peak", f"{self.best_share:.0%} of the peak, the best known share"
        one_ring = "one of eight network cards is filled", "one ring fills all cards"
        return (
            Bounds("products, TFLOP/s", 0.2 * self.peak, self.peak * self.best_share, why),
            Bounds("share of the line rate", 0.3, 1.0, ("less is no InfiniBand", "the line rate")),
            Bounds("of which one ring", 0.1, 1.0, one_ring),
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
        self.system, self.is_baseline = system, "baseline" in cell["note"]
        self.hidden, self.layers = int(cell["hidden"]), int(cell["layers"])
        self.tensor, self.pipeline = int(cell["tp"]), int(cell["pp"])
        self.seq = int(cell["seq"])
        self.tokens = self.seq * int(cell["micro_batch"])
        self.weights = 12 * self.layers * self.hidden**2 + VOCABULARY * self.hidden
        self.replicas = int(cell["gpus"]) // self.tensor // self.pipeline
        self.in_node = max(1, system.per_node // self.tensor // self.pipeline)
        self.nodes = self.replicas // self.in_node

    @property
    def flops(self) -> float:
        """Operations of a step of one replica, without recomputation."""
        more = self.seq / 6 / self.hidden + VOCABULARY / 12 / self.layers / self.hidden
        return 72 * self.tokens * self.layers * self.hidden**2 * (1 + more)

    def tflops(self, products: float, share: float, one_ring: float) -> float:
        """Return the TFLOP/s of a GPU."""
        cluster = self.system.cluster
        is_one_ring = self.is_baseline and self.tensor * self.pipeline == 1
        far = cluster.link_rate * share * (one_ring if is_one_ring else 1.0)
        rates = cluster.at(TYPICAL, torch.bfloat16)
        rates = replace(rates, products=products * TERA, far=far)
        computing = self.flops / self.tensor / rates.products_at(self.hidden)
        seconds = computing + self._tensor_seconds(rates) + self._sending(rates)
        return self.flops / self.tensor / self.pipeline / seconds / TERA

    def _tensor_seconds(self, rates: Rates) -> float:
        if self.tensor == 1:
            return 0.0
        part = 2 * self.tokens * self.hidden * (self.tensor - 1) / self.tensor
        return MOVES * self.layers * ring(self.tensor, 1, part, 0.0).hop(rates).seconds

    def _sending(self, rates: Rates) -> float:
        per_rank = self.weights / self.tensor / self.pipeline
        # A node's replicas of a part form one ring; it has rings of several parts.
        rings = self.system.per_node / self.in_node
        if self.is_baseline:
            passed = per_rank * (self.replicas - 1) / self.replicas
            messages: list[Load] = [
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
            kernels = sum(constants[name] for name in KERNELS) * per_rank / rates.memory
        return sum(each.hop(rates).seconds for each in messages if not each.is_empty) + kernels


def check(system: System) -> CheckedSet:
    """Return predicted beside measured on one of the clusters."""
    cells = [
        cell for cell in read_cells("public.tsv")
        if cell["source"].startswith("SDP4Bit") and cell["gpu"] == system.gpu
    ]  # fmt: skip
    steps = [(cell, Step(cell, system), float(cell["tflops_gpu"])) for cell in cells]
    constants, text = fit(
        lambda point: log_squares(
            (step.tflops(*point), measured) for _, step, measured in steps if step.is_baseline
        ),
        system.bounds,
    )
    predictions = tuple(
        Prediction(
            f"{cell['model']} on {cell['gpus']} {system.gpu}, TP {cell['tp']}, PP {cell['pp']}",
            "baseline TFLOPs" if step.is_baseline else "SDP4Bit TFLOPs",
            step.tflops(*constants),
            measured,
            step.is_baseline,
        )
        for cell, step, measured in steps
    )
    name = f"SDP4Bit, {cells[0]['gpus']} {system.gpu}"
    return CheckedSet(name, text, predictions, system.targets)
