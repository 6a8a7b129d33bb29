"""The ZeRO++ figures: DeepSpeed's ZeRO-3 and ZeRO++ on 24 nodes of 16 V100.

A step is the sum of its parts: DeepSpeed's runs hid next to nothing of their communication. What
they sent is replayed (`deepspeed_fetches.py`); rings and all-to-alls take the planner's times. Two
constants, the rate of products and the share of the line rate, are fitted to the 20 baselines.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from benchmarks.plan.bounded_fit import Bounds, fit
from benchmarks.plan.cells import CheckedSet, Prediction, log_squares, read_cells
from benchmarks.plan.deepspeed_fetches import Fetches, fetches
from megatron_zpp.planner.timing.hardware import (
    TERA,
    TYPICAL,
    Cluster,
    Description,
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
Cell = dict[str, str]


class Step:
    """A cell's step: its operations, what it fetches, and how long it takes."""

    def __init__(self, cell: Cell, width: int) -> None:
        self.cell = cell
        self.hidden = int(cell["hidden"] or width)
        self.layers = int(cell["layers"] or round(float(cell["params"]) / 12 / width**2))
        self.weights = 12 * self.layers * self.hidden**2
        self.nodes, self.per_node = int(cell["nodes"]), int(cell["gpus_per_node"])
        self.ranks = self.nodes * self.per_node
        self.fetches: Fetches = _fetches(self.layers, self.hidden)

    @property
    def flops(self) -> float:
        """Operations of a GPU, recomputation included, as Megatron counts them."""
        more = SEQUENCE / 6 / self.hidden + VOCABULARY / 16 / self.layers / self.hidden
        tokens = int(self.cell["tokens_per_gpu"])
        return 96 * tokens * self.layers * self.hidden**2 * (1 + more)

    def tflops(self, products: float, share: float) -> float:
        """Return the reached TFLOP/s of a GPU."""
        cluster = _cluster(self.cell["link_gbps"], self.nodes)
        rates = cluster.at(TYPICAL, torch.float16)
        rates = replace(rates, far=cluster.link_rate * share)
        quantized = self.cell["setting"] == "all"
        sending = self._zeropp(rates) if quantized else self._zero3(rates)
        return self.flops / (self.flops / (products * TERA) + sending) / TERA

    def _zero3(self, rates: Rates) -> float:
        fetched = self.fetches
        buckets = self.weights / BUCKET
        return sum(
            self._ring(2 * share * self.weights, count, rates)
            for share, count in (
                (fetched.forward, fetched.forward_gathers),
                (fetched.backward, fetched.backward_gathers),
                (1.0, max(1.0, buckets)),
            )
        )

    def _zeropp(self, rates: Rates) -> float:
        """Count INT8 gathers and one more for their scales; INT4 gradients, tensor by tensor."""
        fetched, weights, kernels = self.fetches, self.weights, hardware_table()["kernels"]
        seconds = self._ring(fetched.forward * weights, fetched.forward_gathers, rates)
        seconds += self._ring(0.0, fetched.forward_gathers, rates)
        near_share = (self.per_node - 1) / self.per_node
        message = ring(
            self.per_node,
            1,
            2 * fetched.backward * weights / fetched.backward_gathers * near_share,
            0,
        )
        seconds += fetched.backward_gathers * message.hop(rates).seconds
        tensors = 4 * self.layers
        gradient = weights / 2 / tensors
        far_share = (self.nodes - 1) / self.nodes
        for message in (exchange(gradient * near_share, 0.0), exchange(0.0, gradient * far_share)):
            seconds += tensors * message.hop(rates).seconds
        touched = fetched.forward * kernels["dequantize_weights"]
        touched += kernels["quantize_gradients"] + kernels["sum_gradients"]
        return seconds + touched * weights / rates.memory

    def _ring(self, num_bytes: float, count: float, rates: Rates) -> float:
        """Return the seconds of gathers or reductions of so many bytes in all."""
        each = max(1.0, num_bytes / count * (self.ranks - 1) / self.ranks)
        return count * ring(self.ranks, self.nodes, each, each).hop(rates).seconds


def check(width: int = WIDTHS[0]) -> CheckedSet:
    """Return predicted beside measured, with an unknown width of the larger models."""
    cells = read_cells("zeropp_paper.tsv")
    figures = [cell for cell in cells if cell["table"].startswith("eval")]
    baselines = [cell for cell in figures if cell["setting"] == "baseline"]
    constants, text = fit(
        lambda point: log_squares((Step(c, width).tflops(*point), _measured(c)) for c in baselines),
        BOUNDS,
    )
    predictions = _pairs(figures, width, constants, "")
    remembered = [cell for cell in cells if cell["table"].startswith("arxiv")]
    predictions += _pairs(remembered, width, constants, " (remembered)")
    targets = TARGETS if width == WIDTHS[0] else ()
    return CheckedSet(
        name=f"ZeRO++ figures, width {width}", constants=text, predictions=tuple(predictions),
        targets=targets,
    )  # fmt: skip


def _pairs(
    cells: Sequence[Cell], width: int, constants: Sequence[float], suffix: str
) -> list[Prediction]:
    """Return the predictions of pairs of cells: baseline, and ZeRO++ on the same hardware."""
    predictions = []
    is_fitted = not suffix
    for baseline, zeropp in zip(cells[::2], cells[1::2], strict=True):
        assert (baseline["setting"], zeropp["setting"]) == ("baseline", "all"), baseline
        slow, fast = (Step(cell, width).tflops(*constants) for cell in (baseline, zeropp))
        tokens, link = baseline["tokens_per_gpu"], baseline["link_gbps"]
        of = f"{baseline['model']}, {tokens} tokens, {link} Gbit/s"
        measured = _measured(baseline), _measured(zeropp)
        for quantity, predicted, real, fitted in (
            ("ZeRO-3 TFLOPs", slow, measured[0], is_fitted),
            ("ZeRO++ TFLOPs", fast, measured[1], False),
            ("speedup", fast / slow, measured[1] / measured[0], False),
        ):
            predictions.append(
                Prediction(
                    of=of,
                    quantity=quantity + suffix,
                    predicted=predicted,
                    measured=real,
                    is_fitted=fitted,
                )  # fmt: skip
            )
    return predictions


def _measured(cell: Cell) -> float:
    return float(cell["tflops_per_gpu"])


@cache
def _fetches(layers: int, hidden: int) -> Fetches:
    return fetches(layers, hidden)


@cache
def _cluster(link_gbps: str, nodes: int) -> Cluster:
    return find_cluster(Description(cluster="dgx-2", num_nodes=nodes, link=f"{link_gbps}gbit"))
