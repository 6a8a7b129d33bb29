"""The error of quantization against its bytes: block sizes, scale types, codes, two hops.

Measured on Gaussian numbers, and on the weights and gradients of a small GPT trained for some steps
on the text of Python's standard library. First the PyTorch model of zeropp's format must give the
same numbers as its ops. Error: relative L2 over all tensors together. Gain: the factor of the
least-squares fit of the result to the input. docs/numerics.md discusses both.
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.codes.block_codes import (
    CODES,
    SCALES,
    BlockCode,
    gain_of,
    verify,
    zeropp_round_trip,
)
from benchmarks.codes.small_gpt import SmallGPT
from benchmarks.convergence.variants import FLAGS
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.charts import chart
from benchmarks.shared.table import Column, table
from zeropp.quant.ops import quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import BLOCK, ROTATED_4, RowLayout

BITS = (8, 4)  # INT3 is of rotated numbers, which no code here represents
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
DATA = ("Gaussian", "weights", "gradients")
MODEL = f"{FLAGS} --hidden-size 256 --num-layers 4"
NODES, RANKS_PER_NODE = 2, 2
HOPS = ((8, 4), (4, 4), (8, 8), (16, 4), (16, 16))
GAUSSIAN = 1 << 21  # elements
CURVES = (  # code, scale, label, colour in the chart
    ("signed", "bf16", "signed extreme, bf16 scale (used)", "#e8710a"),
    ("signed", "fp32", "signed extreme, fp32 scale", "#d6568f"),
    ("symmetric", "bf16", "max / (2^(b-1) - 1), to nearest", "#4c8bf5"),
    ("clipped", "bf16", "2 max / 2^b, clipped", "#a06be0"),
    ("half-step", "bf16", "half a step off", "#2ea36f"),
)
SECTIONS: tuple[tuple[str, Callable[[dict], bool]], ...] = (
    ("block sizes", lambda row: (row["code"], row["scale"]) == ("signed", "bf16")),
    ("types of scales", lambda row: (row["code"], row["block"]) == ("signed", BLOCK[row["bits"]])),
    ("codes", lambda row: (row["scale"], row["block"]) == ("bf16", BLOCK[row["bits"]])),
    ("scales of one byte, powers of two", lambda row: row["scale"] == "2^n"),
)

Tensors = Sequence[Tensor]  # each flat, fp32


def measure(options: Options, result: dict) -> None:
    """Train, verify, measure."""
    torch.set_num_threads(1)
    loss, weights, gradients = train(options.steps)
    generator = torch.Generator().manual_seed(5)
    noise = [[torch.randn(GAUSSIAN, generator=generator)] for _ in gradients]
    data = dict(zip(DATA, (noise[0], weights, gradients[0]), strict=True))
    codes = {f"INT{bits}": (code_of(bits), bits) for bits in BITS}
    verify(codes, itertools.chain(*data.values()))
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
    """The last loss, the weights, and each rank's next gradients, of its own samples."""
    loss = float("nan")
    with SmallGPT(MODEL, max(1, steps)) as gpt:
        for _ in range(steps):
            loss = gpt.step()
        weights = [weight.flatten() for weight in gpt.matrices().values()]
        gradients = [
            [gradient.flatten() for gradient in gpt.gradients().values()]
            for _ in range(NODES * RANKS_PER_NODE)
        ]
    return loss, weights, gradients


def code_of(bits: int, **settings: object) -> BlockCode:
    """A code of `bits` bits; by default zeropp's."""
    return BlockCode(**{"block": BLOCK[bits], "top": 1 << (bits - 1), **settings})


def one_hop(bits: int, data: Mapping[str, Tensors]) -> list[dict]:
    """A row per code: drawn curves at every block size, others at zeropp's block size."""
    codes = [
        code_of(bits, block=block, code=code, scale=scale)
        for code, scale, *_ in CURVES
        for block in BLOCKS
    ]
    codes += [code_of(bits, scale=scale) for scale in SCALES if scale != "2^n"]
    codes += [code_of(bits, code=code) for code in CODES]
    codes += [code_of(bits, block=block, code="clipped", scale="2^n") for block in BLOCKS]
    return [
        {
            "bits": bits,
            "block": code.block,
            "code": code.code,
            "scale": code.scale,
            "bytes": code.bytes_per_element,
            "errors": {
                name: error_statistics(tensors, [code.round_trip(each).values for each in tensors])
                for name, tensors in data.items()
            },
        }
        for code in dict.fromkeys(codes)
    ]


def two_hops(bits: tuple[int, int], ranks: Sequence[Tensors]) -> dict:
    """Errors of the mean over the ranks after both hops, compared with their mean in fp64.

    4 bits are those of gradients, rotated; the sizes of tensors are multiples of 32.

    `expected` is the error if the errors of all quantizations were independent: each hop's own
    error, times the norm of what it carried, over the norm of the sum.
    """
    exact, results, noise = [], [], 0.0
    wire = torch.bfloat16
    widths = [ROTATED_4 if width == 4 else width for width in bits]
    for values in zip(*ranks, strict=True):
        rows = torch.stack(values)
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
    return {"bits": bits, "expected": (noise / size) ** 0.5, **error_statistics(exact, results)}


def error_statistics(exact: Tensors, results: Tensors) -> dict:
    """Relative L2 error, fitted gain and cosine over all tensors, and the gain furthest from 1."""
    gains = [1.0, *map(gain_of, exact, results)]
    a, b = (torch.cat(list(tensors)).double() for tensors in (exact, results))
    return {
        "error": float((a - b).norm() / a.norm()),
        "gain": gain_of(a, b),
        "cosine": float(torch.cosine_similarity(a, b, dim=0)),
        "worst_gain": max(gains, key=lambda gain: abs(gain - 1)),
    }


def _squared_error(row: Tensor, bits: int, wire: torch.dtype) -> float:
    """Of one quantization of `row` (n,); 16 bits stand for the wire's dtype."""
    result = row.to(wire).float() if bits == 16 else zeropp_round_trip(row, bits)
    return float((result - row).double().square().sum())


def show(result: dict) -> str:
    """A description of the data, and every table."""
    sizes = ", ".join(f"{name} {count:,}" for name, count in result["elements"].items())
    parts = [
        "Before the measurement the PyTorch model of zeropp's format gave exactly the numbers of "
        f"its ops. The GPT was trained by pretrain_gpt.py's own step, with `{result['model']}`. "
        f"Elements: {sizes}. Weights and gradients are those of a GPT after {result['steps']} "
        f"steps (loss {result['loss']:.3f}), without one-dimensional parameters. Error: relative "
        "L2. Gain: of the least-squares fit over all tensors; in brackets that of the tensor "
        "furthest from 1. **Bold**: what zeropp uses."
    ]
    for bits in BITS:
        for title, belongs in SECTIONS:
            rows = [row for row in result["one_hop"] if row["bits"] == bits and belongs(row)]
            parts += [f"## INT{bits}: {title}", show_one_hop(rows)]
    return "\n\n".join([*parts, "## Two hops", show_two_hops(result["two_hops"])])


def show_one_hop(rows: Iterable[dict]) -> str:
    """A table of codes."""

    def of(name: str, value: Callable[[dict], object]) -> Callable[[dict], object]:
        return lambda row: value(row["errors"][name])

    return table(
        sorted(rows, key=lambda row: row["block"]),
        *(Column(name, name) for name in ("code", "scale", "block")),
        Column("bytes", "bytes", ".4f"),
        *(Column(f"error, {name}", of(name, lambda each: each["error"]), ".3%") for name in DATA),
        *(Column(f"gain, {name}", of(name, _gains)) for name in DATA),
        bold=is_zeropp,
    )


def show_two_hops(rows: Iterable[dict]) -> str:
    """A table of pairs of widths."""
    return table(
        rows,
        Column("bits", lambda row: "{}, {}".format(*row["bits"])),
        Column("data", "data"),
        Column("error", "error", ".2%"),
        Column("expected", "expected", ".2%"),
        Column("cosine", "cosine", ".5f"),
        Column("gain", _gains),
        bold=lambda row: tuple(row["bits"]) == (8, 4),
    )


def is_zeropp(row: dict) -> bool:
    """Whether a row shows the code that zeropp uses."""
    return (row["code"], row["scale"], row["block"]) == ("signed", "bf16", BLOCK[row["bits"]])


def _gains(errors: dict) -> str:
    return f"{errors['gain']:.4f} ({errors['worst_gain']:.4f})"


def draw(result: dict, path: Path) -> None:
    """Write the PNG: INT8 on weights and INT4 on gradients, as zeropp uses them."""
    with chart(path, (10.0, 4.4), 2) as (figure, panels):
        for axes, bits, data in zip(panels, BITS, ("weights", "gradients"), strict=True):
            axes.set(xscale="log", yscale="log", xlabel="bytes of the scales per element")
            axes.set_title(f"INT{bits}, on {data}", fontsize=11)
            axes.set_ylabel("error, %")
            for code, scale, label, colour in reversed(CURVES):
                rows = [
                    row
                    for row in sorted(result["one_hop"], key=lambda row: row["bytes"])
                    if (row["bits"], row["code"], row["scale"]) == (bits, code, scale)
                ]
                points = [
                    (row["bytes"] - bits / 8, 100 * row["errors"][data]["error"]) for row in rows
                ]
                axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
                for row, point in zip(rows, points, strict=True):
                    if is_zeropp(row):
                        ring = {"marker": "o", "markersize": 10, "fillstyle": "none"}
                        axes.plot(*point, **ring, color=colour)
                        axes.annotate(f"blocks of {row['block']}", point, color=colour)
        handles = panels[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3)


OPTIONS = (Flag("--steps", 200, "of training"),)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, draw=draw)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
