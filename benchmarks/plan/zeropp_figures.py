"""The ZeRO++ figures: DeepSpeed's ZeRO-3 and ZeRO++ on 24 nodes of 16 V100.

A step is the sum of its parts: DeepSpeed's runs hid next to nothing of their communication. What
they sent is replayed (`deepspeed_fetches.py`); rings and all-to-alls take the planner's times. Two
constants, the rate of products and the share of the line rate, are fitted to the 20 baselines.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

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
from benchmarks.plan.deepspeed_fetches import fetches
from megatron_zpp.planner.timing.hardware import (
    TERA,
    TYPICAL,
    Rates,
    find_cluster,
    hardware_table,
)
from megatron_zpp.planner.timing.links import exchange, ring

SEQUENCE, VOCABULARY = 512, 50257  # of the tutorial; they change the operations by 2%
BUCKET = 5e8  # gradients that DeepSpeed reduces at once
WIDTHS = (8192, 10240, 12288)  # the figures do not say the width of 49B to 138B
PEAK = 125.0
BOUNDS = (
    Bounds(
        "products, TFLOP/s", 0.2 * PEAK, 0.87 * PEAK,
        ("a fifth of the peak", "87% of the peak, the best known share"),
    ),
    Bounds("share of the line rate", 0.3, 1.0, ("less is no InfiniBand", "the line rate")),
)  # fmt: skip
TARGETS = (("speedup", 0.10, 0.20), ("ZeRO++ TFLOPs", 0.12, 0.28))
find_cached_cluster, cached_fetches = cache(find_cluster), cache(fetches)


class Step:
    """A cell's step: its operations, what it fetches, and how long it takes."""

    def __init__(self, cell: Cell, width: int) -> None:
        self.cell = cell
        self.hidden = int(cell["hidden"] or width)
        self.layers = int(cell["layers"] or round(float(cell["params"]) / 12 / width**2))
        self.weights = 12 * self.layers * self.hidden**2
        self.nodes, self.per_node = int(cell["nodes"]), int(cell["gpus_per_node"])
        self.ranks = self.nodes * self.per_node
        self.fetches = cached_fetches(self.layers, self.hidden)

    @property
    def measured(self) -> float:
        """The TFLOP/s of a GPU that the figure shows."""
        return float(self.cell["tflops_per_gpu"])

    @property
    def flops(self) -> float:
        """Operations of a GPU, recomputation included, as Megatron counts them."""
        more = SEQUENCE / 6 / self.hidden + VOCABULARY / 16 / self.layers / self.hidden
        tokens = int(self.cell["tokens_per_gpu"])
        return 96 * tokens * self.layers * self.hidden**2 * (1 + more)

    def tflops(self, products: float, share: float) -> float:
        """Return the reached TFLOP/s of a GPU."""
        link = f"{self.cell['link_gbps']}gbit"
        cluster = find_cached_cluster(cluster="dgx-2", num_nodes=self.nodes, link=link)
        rates = replace(cluster.at(TYPICAL, torch.float16), far=cluster.link_rate * share)
        quantized = self.cell["setting"] == "all"
        sending = self._zeropp(rates) if quantized else self._zero3(rates)
        return self.flops / (self.flops / (products * TERA) + sending) / TERA

    def _zero3(self, rates: Rates) -> float:
        fetched, buckets = self.fetches, max(1.0, self.weights / BUCKET)
        return sum(
            self._ring(2 * share * self.weights, count, rates)
            for share, count in (
                (fetched.forward, fetched.forward_gathers),
                (fetched.backward, fetched.backward_gathers),
                (1.0, buckets),
            )
        )

    def _zeropp(self, rates: Rates) -> float:
        """Count INT8 gathers and one more for their scales; INT4 gradients, tensor by tensor."""
        fetched, weights, kernels = self.fetches, self.weights, hardware_table()["kernels"]
        seconds = self._ring(fetched.forward * weights, fetched.forward_gathers, rates)
        seconds += self._ring(0.0, fetched.forward_gathers, rates)
        near_share = (self.per_node - 1) / self.per_node
        gathered = 2 * fetched.backward * weights / fetched.backward_gathers * near_share
        gather = ring(self.per_node, 1, gathered, 0)
        seconds += fetched.backward_gathers * gather.hop(rates).seconds
        tensors = 4 * self.layers
        gradient = weights / 2 / tensors
        far_share = (self.nodes - 1) / self.nodes
        for message in (exchange(gradient * near_share, 0.0), exchange(0.0, gradient * far_share)):
            seconds += tensors * message.hop(rates).seconds
        touched = fetched.forward * kernels["dequantize_weights"]
        touched += kernels["quantize_gradients"] + kernels["sum_gradients"]
        return seconds + touched * weights / rates.memory

    def _ring(self, num_bytes: float, count: float, rates: Rates) -> float:
        """Return the seconds of `count` gathers or reductions of `num_bytes` in all."""
        each = max(1.0, num_bytes / count * (self.ranks - 1) / self.ranks)
        return count * ring(self.ranks, self.nodes, each, each).hop(rates).seconds


def check(width: int = WIDTHS[0]) -> CheckedSet:
    """Return predicted beside measured, with an unknown width of the larger models."""
    cells = read_cells("zeropp_paper.tsv")
    figures, remembered = (
        [Step(cell, width) for cell in cells if cell["table"].startswith(kind)]
        for kind in ("eval", "arxiv")
    )
    baselines = [each for each in figures if each.cell["setting"] == "baseline"]
    constants, text = fit(
        lambda point: log_squares((each.tflops(*point), each.measured) for each in baselines),
        BOUNDS,
    )
    predictions = _pairs(figures, constants, "")
    predictions += _pairs(remembered, constants, " (remembered)")
    targets = TARGETS if width == WIDTHS[0] else ()
    return CheckedSet(f"ZeRO++ figures, width {width}", text, tuple(predictions), targets)


def _pairs(steps: Sequence[Step], constants: Sequence[float], suffix: str) -> list[Prediction]:
    """Return the predictions of pairs of cells: baseline, and ZeRO++ on the same hardware."""
    predictions = []
    for baseline, zeropp in zip(steps[::2], steps[1::2], strict=True):
        cell = baseline.cell
        assert (cell["setting"], zeropp.cell["setting"]) == ("baseline", "all"), cell
        slow, fast = (step.tflops(*constants) for step in (baseline, zeropp))
        of = f"{cell['model']}, {cell['tokens_per_gpu']} tokens, {cell['link_gbps']} Gbit/s"
        real = baseline.measured, zeropp.measured
        predictions += [
            Prediction(of, f"ZeRO-3 TFLOPs{suffix}", slow, real[0], not suffix),
            Prediction(of, f"ZeRO++ TFLOPs{suffix}", fast, real[1]),
            Prediction(of, f"speedup{suffix}", fast / slow, real[1] / real[0]),
        ]
    return predictions
