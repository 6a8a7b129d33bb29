"""The error of quantization against its bytes: block sizes, types of scales, codes, two hops.

    python benchmarks/convergence/numerics.py [--steps N] [--json FILE] [--plot FILE.svg] [--results FILE.md]

Measured on Gaussian numbers, and on the weights and gradients of a small GPT trained for some steps
on the text of Python's standard library. The plain-torch model of the format that zeropp uses is
first compared with its ops, number by number. Error: relative L2 over all tensors together. Gain:
the factor of the least-squares fit of what came out to what went in. docs/numerics.md uses both.
"""

import argparse
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.convergence.arms import FLAGS  # noqa: E402
from benchmarks.convergence.codes import CODES, SCALES, Scheme, built  # noqa: E402
from benchmarks.convergence.numerics_chart import draw  # noqa: E402
from benchmarks.convergence.numerics_report import page, tables  # noqa: E402
from benchmarks.shared.surroundings import surroundings  # noqa: E402
from megatron_zpp.monitor.console import Console  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.settings.arguments import parse  # noqa: E402
from megatron_zpp.train.build import build_run  # noqa: E402
from megatron_zpp.train.loop import TRAIN, loader  # noqa: E402
from megatron_zpp.train.step import forward_backward, train_step  # noqa: E402
from megatron_zpp.train.stop import Stopping  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.optim.step import local_part  # noqa: E402
from zeropp.quant.ops import quantize, reduce_dequantize, reduce_quantize  # noqa: E402
from zeropp.quant.packing import BLOCK, Layout  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
MODEL = f"{FLAGS} --hidden-size 256 --num-layers 4"
NODES, RANKS_PER_NODE = 2, 2
HOPS = ((8, 4), (4, 4), (8, 8), (16, 4), (16, 16))
GAUSSIAN = 1 << 21  # elements
DRAWN = ("signed, bf16", "signed, fp32", "symmetric, bf16", "clipped, bf16", "half-step, bf16")

Tensors = Sequence[Tensor]  # each flat, fp32


def main() -> int:
    """Train, verify, measure, print the tables."""
    options = read_options()
    torch.set_num_threads(1)
    here = surroundings()
    loss, weights, gradients = trained(options.steps)
    generator = torch.Generator().manual_seed(5)
    noise = [[torch.randn(GAUSSIAN, generator=generator)] for _ in gradients]
    data = {"Gaussian": noise[0], "weights": weights, "gradients": gradients[0]}
    for tensors in data.values():
        verify(tensors)
    result = {
        "benchmark": "numerics",
        "command": shlex.join(["python", "benchmarks/convergence/numerics.py", *sys.argv[1:]]),
        **here,
        "model": MODEL,
        "steps": options.steps,
        "loss": loss,
        "elements": {name: sum(map(len, tensors)) for name, tensors in data.items()},
        "one_hop": [row for bits in (8, 4) for row in one_hop(bits, data)],
        "two_hops": [
            {"data": name, **two_hops(bits, ranks)}
            for name, ranks in (("Gaussian", noise), ("gradients", gradients))
            for bits in HOPS
        ],
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text if options.json == "-" else tables(result), end="")
    files = {options.json: text, options.plot: draw(result), options.results: page(result)}
    for name, content in files.items():
        if name not in (None, "-"):
            write_atomically(Path(name), lambda file, text=content: file.write(text.encode()))
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    parser.add_argument("--json", metavar="FILE", help="write the result here; - prints only it")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw error against bytes")
    parser.add_argument("--results", metavar="FILE.md", help="write a page with the tables")
    return parser.parse_args()


def trained(steps: int) -> tuple[float, Tensors, list[Tensors]]:
    """The last loss, the weights, and the next gradients of each rank's own samples.

    Only of parameters with two dims: others are not quantized.
    """
    words = [*MODEL.split(), "--train-iters", str(max(1, steps)), "--eval-iters", "0"]
    words += ["--zero-stage", "0", "--seed", "1"]
    config = parse(words, 1)
    ranks = join_ranks(Environment(), config.parallel)
    console = Console(0, io.StringIO(), interactive=False)
    run = build_run(config, ranks, console, Stopping(config.training))
    batches, loss = loader(run, TRAIN, 0), float("nan")
    for _ in range(steps):
        loss = train_step(run, batches).result().loss
    matrices = [weight for weight in run.sharding.model.parameters() if weight.dim() > 1]
    weights = [local_part(weight.detach()).flatten().clone() for weight in matrices]
    gradients = []
    for _ in range(NODES * RANKS_PER_NODE):
        run.sharding.model.zero_grad()
        forward_backward(run, batches, config.batch.global_batch_size, 1.0)
        gradients.append([local_part(weight.grad).flatten().clone() for weight in matrices])
    batches.close()
    dist.destroy_process_group()
    return loss, weights, gradients


def verify(tensors: Tensors) -> None:
    """End the program unless the model of zeropp's format does what the ops do."""
    for bits, block in BLOCK.items():
        scheme = Scheme(bits=bits, block=block)
        for values in tensors:
            if not torch.equal(scheme.there_and_back(values), built(values, bits)):
                sys.exit(f"error: INT{bits}: the ops and the model differ; nothing was measured")


def one_hop(bits: int, data: Mapping[str, Tensors]) -> list[dict]:
    """A row for each scheme: every block size in what is drawn, the rest at zeropp's block."""
    schemes = [
        Scheme(bits=bits, block=block, code=code, scale=scale)
        for code, scale in (name.split(", ") for name in DRAWN)
        for block in BLOCKS
    ]
    schemes += [Scheme(bits=bits, block=BLOCK[bits], scale=scale) for scale in SCALES]
    schemes += [Scheme(bits=bits, block=BLOCK[bits], code=code) for code in CODES]
    schemes += [Scheme(bits=bits, block=block, code="clipped", scale="2^n") for block in BLOCKS]
    return [
        {
            "bits": bits, "block": one.block, "code": one.code, "scale": one.scale,
            "bytes": one.bytes_per_element,
            "found": {
                name: moments(tensors, [one.there_and_back(values) for values in tensors])
                for name, tensors in data.items()
            },
        }
        for one in dict.fromkeys(schemes)
        if one.scale != "2^n" or one.code == "clipped"
    ]  # fmt: skip


def two_hops(bits: tuple[int, int], ranks: Sequence[Tensors]) -> dict:
    """The mean over the ranks through both hops, beside their mean in fp64.

    `expected` is the error if those of all quantizations were independent: each hop's own, times
    the norm of what it carried, over the norm of the sum.
    """
    means, found, noise = [], [], 0.0
    wire = torch.bfloat16
    for values in zip(*ranks, strict=True):
        rows = torch.stack(values)
        first, second = (Layout(sizes=(rows.shape[1],), bits=(one,), wire=wire) for one in bits)
        packed = quantize(rows, first).split(RANKS_PER_NODE)
        sums = [reduce_quantize(node, first, second, terms=RANKS_PER_NODE) for node in packed]
        total = torch.empty(rows.shape[1])
        reduce_dequantize(torch.cat(sums), total, second)
        found.append(total / len(ranks))
        means.append(rows.double().mean(0))
        nodes = rows.view(NODES, RANKS_PER_NODE, -1).sum(1)
        for width, carried in zip(bits, (rows, nodes), strict=True):
            for row in carried:
                back = row.to(wire).float() if width == 16 else built(row, width)
                noise += float((back - row).double().square().sum())
    size = sum(float(mean.square().sum()) for mean in means) * len(ranks) ** 2
    return {"bits": bits, "expected": (noise / size) ** 0.5, **moments(means, found)}


def moments(exact: Tensors, found: Tensors) -> dict:
    """Relative L2 error, fitted gain and cosine over all tensors, and the gain furthest from 1."""
    error = size = product = square = 0.0
    gains = [1.0]
    for one, other in zip(exact, found, strict=True):
        a, b = one.double(), other.double()
        own, both = float(a.square().sum()), float((a * b).sum())
        error += float((a - b).square().sum())
        size, product, square = size + own, product + both, square + float(b.square().sum())
        gains.append(both / own if own else 1.0)
    return {
        "error": (error / size) ** 0.5,
        "gain": product / size,
        "cosine": product / (size * square) ** 0.5,
        "worst_gain": max(gains, key=lambda gain: abs(gain - 1)),
    }


if __name__ == "__main__":
    sys.exit(main())
