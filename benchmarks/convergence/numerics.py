"""The error of quantization against its bytes: block sizes, scale types, codes, two hops.

    python -m benchmarks.convergence.numerics [--steps N] [--json FILE] [--plot FILE.png]
        [--results FILE.md]

Measured on Gaussian numbers, and on the weights and gradients of a small GPT trained for some steps
on the text of Python's standard library. First the PyTorch model of zeropp's format must give the
same numbers as its ops. Error: relative L2 over all tensors together. Gain: the factor of the
least-squares fit of the result to the input. docs/numerics.md discusses both.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.convergence.numerics_chart import draw
from benchmarks.convergence.numerics_report import tables
from benchmarks.convergence.quantization_schemes import CODES, SCALES, Scheme, zeropp_round_trip
from benchmarks.convergence.variants import FLAGS
from benchmarks.shared.benchmark import Benchmark, Flag
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.pretrain_run import run_step, silent_run, training_batches
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.arguments import parse
from zeropp.optim.step_or_skip import local_part
from zeropp.quant.ops import quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import BLOCK, ROTATED_4, RowLayout
from zeropp.ranks.topology import Environment

BITS = (8, 4)  # INT3 is of rotated numbers, which no scheme here represents
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
MODEL = f"{FLAGS} --hidden-size 256 --num-layers 4"
NODES, RANKS_PER_NODE = 2, 2
HOPS = ((8, 4), (4, 4), (8, 8), (16, 4), (16, 16))
GAUSSIAN = 1 << 21  # elements
DRAWN_CURVES = (
    "signed, bf16", "signed, fp32", "symmetric, bf16", "clipped, bf16", "half-step, bf16",
)  # fmt: skip

Tensors = Sequence[Tensor]  # each flat, fp32


def measure(options: argparse.Namespace, result: dict) -> None:
    """Train, verify, measure."""
    torch.set_num_threads(1)
    loss, weights, gradients = train(options.steps)
    generator = torch.Generator().manual_seed(5)
    noise = [[torch.randn(GAUSSIAN, generator=generator)] for _ in gradients]
    data = {"Gaussian": noise[0], "weights": weights, "gradients": gradients[0]}
    for tensors in data.values():
        verify(tensors)
    result |= {
        "model": MODEL,
        "steps": options.steps,
        "loss": loss,
        "elements": {name: sum(map(len, tensors)) for name, tensors in data.items()},
        "one_hop": [row for bits in BITS for row in one_hop(bits, data)],
        "two_hops": [
            {"data": name, **two_hops(bits, ranks)}
            for name, ranks in (("Gaussian", noise), ("gradients", gradients))
            for bits in HOPS
        ],
    }


def train(steps: int) -> tuple[float, Tensors, list[Tensors]]:
    """The last loss, the weights, and each rank's next gradients, of its own samples.

    Only of parameters with two dimensions; others are not quantized.
    """
    words = [*MODEL.split(), "--train-iters", str(max(1, steps)), "--eval-iters", "0"]
    words += ["--zero-stage", "0", "--seed", "1"]
    config = parse(words, 1)
    run = silent_run(config, join_ranks(Environment(), config.parallel))
    loss, gradients = float("nan"), []
    with training_batches(run) as batches:
        for _ in range(steps):
            loss = run_step(run, batches).loss
        matrices = [
            weight for weight in run.trainer.sharding.model.parameters() if weight.dim() > 1
        ]
        weights = [local_part(weight.detach()).flatten().clone() for weight in matrices]
        for _ in range(NODES * RANKS_PER_NODE):
            run.trainer.sharding.model.zero_grad()
            run.trainer.forward_backward(batches, config.batch.global_batch_size, 1.0)
            gradients.append([local_part(weight.grad).flatten().clone() for weight in matrices])
    return loss, weights, gradients


def verify(tensors: Tensors) -> None:
    """Raise Disagreement unless the model of zeropp's format gives the same numbers as the ops."""
    for bits in BITS:
        scheme = Scheme(bits=bits, block=BLOCK[bits])
        for values in tensors:
            if not torch.equal(scheme.round_trip(values), zeropp_round_trip(values, bits)):
                raise Disagreement(f"INT{bits}: the ops and the model differ; nothing was measured")


def one_hop(bits: int, data: Mapping[str, Tensors]) -> list[dict]:
    """A row per scheme: drawn curves at every block size, others at zeropp's block size."""
    schemes = [
        Scheme(bits=bits, block=block, code=code, scale=scale)
        for code, scale in (name.split(", ") for name in DRAWN_CURVES)
        for block in BLOCKS
    ]
    schemes += [Scheme(bits=bits, block=BLOCK[bits], scale=scale) for scale in SCALES]
    schemes += [Scheme(bits=bits, block=BLOCK[bits], code=code) for code in CODES]
    schemes += [Scheme(bits=bits, block=block, code="clipped", scale="2^n") for block in BLOCKS]
    return [
        {
            "bits": bits,
            "block": scheme.block,
            "code": scheme.code,
            "scale": scheme.scale,
            "bytes": scheme.bytes_per_element,
            "errors": {
                name: error_statistics(tensors, [scheme.round_trip(values) for values in tensors])
                for name, tensors in data.items()
            },
        }
        for scheme in dict.fromkeys(schemes)
        if scheme.scale != "2^n" or scheme.code == "clipped"
    ]


def two_hops(bits: tuple[int, int], ranks: Sequence[Tensors]) -> dict:
    """Errors of the mean over the ranks after both hops, compared with their mean in fp64.

    4 bits are those of gradients, rotated; the sizes of tensors are multiples of 32.

    `expected` is the error if the errors of all quantizations were independent: each hop's own
    error, times the norm of what it carried, over the norm of the sum.
    """
    exact, results, noise = [], [], 0.0
    wire = torch.bfloat16
    for values in zip(*ranks, strict=True):
        rows = torch.stack(values)
        widths = [ROTATED_4 if width == 4 else width for width in bits]
        first, second = (
            RowLayout(sizes=(rows.shape[1],), bits=(width,), wire=wire) for width in widths
        )
        packed = quantize(rows, first).split(RANKS_PER_NODE)
        sums = [reduce_quantize(node, first, second, terms=RANKS_PER_NODE) for node in packed]
        total = torch.empty(rows.shape[1])
        reduce_dequantize(torch.cat(sums), total, second)
        results.append(total / len(ranks))
        exact.append(rows.double().mean(0))
        node_sums = rows.view(NODES, RANKS_PER_NODE, -1).sum(1)
        for width, carried in zip(widths, (rows, node_sums), strict=True):
            noise += sum(_squared_error(row, width, wire) for row in carried)
    size = sum(float(mean.square().sum()) for mean in exact) * len(ranks) ** 2
    return {
        "bits": bits,
        "expected": (noise / size) ** 0.5,
        **error_statistics(exact, results),
    }


def error_statistics(exact: Tensors, results: Tensors) -> dict:
    """Relative L2 error, fitted gain and cosine over all tensors, and the gain furthest from 1."""
    pairs = zip(exact, results, strict=True)
    gains = [1.0, *(_gain(right.double(), result.double()) for right, result in pairs)]
    a, b = (torch.cat(list(tensors)).double() for tensors in (exact, results))
    return {
        "error": float((a - b).norm() / a.norm()),
        "gain": _gain(a, b),
        "cosine": float(torch.cosine_similarity(a, b, dim=0)),
        "worst_gain": max(gains, key=lambda gain: abs(gain - 1)),
    }


def _gain(exact: Tensor, result: Tensor) -> float:
    """The factor of the least-squares fit; 1 where everything is 0."""
    size = float(exact @ exact)
    return float(exact @ result) / size if size else 1.0


def _squared_error(row: Tensor, bits: int, wire: torch.dtype) -> float:
    """Of one quantization of `row` (n,); 16 bits stand for the wire's dtype."""
    result = row.to(wire).float() if bits == 16 else zeropp_round_trip(row, bits)
    return float((result - row).double().square().sum())


BENCHMARK = Benchmark(
    spec=__spec__,
    question=__doc__,
    flags=(Flag("--steps", 200, "of training"),),
    measure=measure,
    show=tables,
    draw=draw,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
