"""Which code gradients are sent in: the error of each against the bytes it takes when compressed.

Measured on the gradients of a small GPT at several steps of its training on the text of Python's
standard library, on the same ones with 8 of each 512 columns times 30 (massive activations have
such columns), and beside such columns in Gaussian numbers and in numbers with a positive mean.
First the models of zeropp's formats must give the same numbers as its ops.

Coded: bits of an element after Zstandard, level 1, over packed bytes (two codes to a byte, if they
are at most 16), with a scale of 16 bits per block. Entropy: of single codes, with the scale. Error:
relative L2 over all matrices together. Gain: the factor of the least-squares fit of the result to
the input. Beside: of the elements in the other columns.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.codes.block_codes import (
    BlockCode,
    Coded,
    candidates,
    gain_of,
    verify,
)
from benchmarks.codes.small_gpt import SmallGPT
from benchmarks.convergence.variants import FLAGS
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.table import Column, table
from zeropp.quant.packing import ROTATED_4

zstd = importlib.import_module(
    "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
)
MODEL = f"{FLAGS} --hidden-size 512 --num-layers 2 --num-attention-heads 8"
COLUMNS, LARGE, FACTOR = 512, 8, 30.0
DRAWN_ROWS = 2048
CHUNK = 1 << 18  # bytes that are compressed together
SCALE_BITS = 16
ZEROPP: Mapping[str, int] = {"INT4, blocks of 128": 4, "rotated INT4": ROTATED_4, "INT3": 3}
GAIN_OF_ALL, GAIN_BESIDE = 0.005, 0.02  # how far from 1 they may be


def measure(options: Options, result: dict) -> None:
    """Train, verify, measure."""
    torch.set_num_threads(1)
    matrices, losses = gradients(options.steps)
    gaussian = torch.randn(DRAWN_ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    positive = gaussian.abs() / 2 + gaussian / 2
    codes = candidates()
    verify(zeropp_codes(), [*matrices, gaussian])
    result |= {
        "model": MODEL, "steps": options.steps, "losses": losses,
        "elements": sum(matrix.numel() for matrix in matrices),
        "codes": [figures(code, matrices, gaussian, positive) for code in codes],
    }  # fmt: skip


def gradients(steps: Sequence[int]) -> tuple[list[Tensor], list[float]]:
    """The gradients (rows, 512) of the matrices of the blocks at these steps, and the losses."""
    found, losses = [], []
    with SmallGPT(MODEL, max(steps) + 1) as gpt:
        for step in range(max(steps) + 1):
            loss = gpt.step()
            if step in steps:
                losses.append(loss)
                found += [
                    gradient.reshape(-1, COLUMNS)
                    for name, gradient in gpt.gradients().items()
                    if name.startswith("blocks.")
                ]
    return found, losses


def zeropp_codes() -> dict[str, tuple[BlockCode, int]]:
    """The models of zeropp's formats, and how many bits those have."""
    return {code.name: (code, ZEROPP[code.name]) for code in candidates() if code.name in ZEROPP}


def figures(
    code: BlockCode, matrices: Sequence[Tensor], gaussian: Tensor, positive: Tensor
) -> dict:
    """The row of one code."""
    beside = large_columns().logical_not()
    enlarged = [with_large_columns(matrix) for matrix in matrices]
    plain = [code.round_trip(matrix) for matrix in matrices]
    results = [code.round_trip(matrix) for matrix in enlarged]
    values = [result.values for result in results]
    drawn, biased = with_large_columns(gaussian), with_large_columns(positive)
    of_drawn = code.round_trip(drawn).values[:, beside]
    of_biased = code.round_trip(biased).values[:, beside]
    coded, entropy = coded_bits(plain)
    rest = [matrix[:, beside] for matrix in enlarged], [each[:, beside] for each in values]
    row = {
        "code": code.name, "coded": coded, "entropy": entropy,
        **error_and_gain(matrices, [result.values for result in plain], ""),
        "columns_coded": coded_bits(results)[0],
        **error_and_gain(enlarged, values, "columns_"), **error_and_gain(*rest, "beside_"),
        "gaussian_beside_gain": gain_of(drawn[:, beside].flatten(), of_drawn.flatten()),
        "zeros": float((of_drawn == 0).float().mean()),
        "bias": float(of_biased.mean() / biased[:, beside].mean()) - 1,
    }  # fmt: skip
    row["eligible"] = is_eligible(row)
    return row


def is_eligible(row: dict) -> bool:
    """Whether gradients keep their size, over all elements and beside large columns."""
    everywhere, beside = ("gain", "columns_gain"), ("beside_gain", "gaussian_beside_gain")
    return all(abs(row[name] - 1) <= GAIN_OF_ALL for name in everywhere) and all(
        abs(row[name] - 1) <= GAIN_BESIDE for name in beside
    )


def error_and_gain(exact: Sequence[Tensor], results: Sequence[Tensor], prefix: str) -> dict:
    """Relative L2 error and fitted gain over all matrices, each brought to the norm 1."""
    size = [matrix.double().norm() for matrix in exact]
    a, b = (
        torch.cat([(each / norm).flatten() for each, norm in zip(tensors, size, strict=True)])
        for tensors in (exact, results)
    )
    return {f"{prefix}error": float((a - b).norm() / a.norm()), f"{prefix}gain": gain_of(a, b)}


def coded_bits(results: Sequence[Coded]) -> tuple[float, float]:
    """Bits of an element after Zstandard, and by the entropy of single codes; with scales."""
    compressed = entropy = 0.0
    for result in results:
        codes = result.codes - result.codes.min()
        counts = torch.bincount(codes.long()).double()
        shares = counts[counts > 0] / len(codes)
        entropy -= float((shares * shares.log2()).sum()) * len(codes)
        packed = codes.to(torch.uint8)
        if len(counts) <= 16:
            packed = packed[0::2] | packed[1::2] << 4
        chunks = (chunk.numpy().tobytes() for chunk in packed.split(CHUNK))
        compressed += 8 * sum(len(zstd.compress(chunk, 1)) for chunk in chunks)
    scales = SCALE_BITS * sum(result.blocks for result in results)
    elements = sum(len(result.codes) for result in results)
    return (compressed + scales) / elements, (entropy + scales) / elements


def large_columns() -> Tensor:
    """(512,) bool."""
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    return torch.zeros(COLUMNS, dtype=torch.bool).index_fill(0, order[:LARGE], True)


def with_large_columns(matrix: Tensor) -> Tensor:
    """The same matrix (rows, 512) with a few columns 30 times as large."""
    return torch.where(large_columns(), matrix * FACTOR, matrix)


def show(result: dict) -> str:
    """All codes."""
    form, percent = ".4f", (".2f", 100)
    rows = table(
        sorted(result["codes"], key=lambda row: row["coded"]),
        Column("", "code"),
        Column("coded bits", "coded", ".3f"),
        Column("entropy", "entropy", ".3f"),
        Column("error, %", "error", *percent),
        Column("gain", "gain", form),
        Column("with large columns: coded", "columns_coded", ".3f"),
        Column("error, %", "columns_error", *percent),
        Column("gain", "columns_gain", form),
        Column("error beside, %", "beside_error", *percent),
        Column("gain beside", "beside_gain", form),
        Column("Gaussian: gain beside", "gaussian_beside_gain", form),
        Column("zeros beside, %", "zeros", *percent),
        Column("positive mean: bias beside, %", "bias", *percent),
        Column("keeps the gain", lambda row: "yes" if row["eligible"] else "no"),
    )
    losses = ", ".join(f"{loss:.2f}" for loss in result["losses"])
    return (
        f"Gradients of a GPT trained by pretrain_gpt.py's own step with `{result['model']}`, at "
        f"steps {', '.join(map(str, result['steps']))} (losses {losses}): {result['elements']:,} "
        f"elements of matrices. A code keeps the gain if it is within {GAIN_OF_ALL} of 1 over all "
        f"elements and within {GAIN_BESIDE} beside large columns.\n\n{rows}"
    )


OPTIONS = (Flag("--steps", (10, 80, 240), "of training, at which gradients are taken"),)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
