"""Which code gradients are sent in: the error of each against the bytes it takes when compressed.

    python -m benchmarks.codes.gradient_codes [--steps N ...] [--json FILE] [--results FILE.md]

Measured on the gradients of a small GPT at several steps of its training on the text of Python's
standard library, on the same ones with 8 of each 512 columns times 30 (massive activations have
such columns), and beside such columns in Gaussian numbers and in numbers with a positive mean.
First the models of zeropp's formats must give the same numbers as its ops.

Coded: bits of an element after Zstandard, level 1, over packed bytes (two codes to a byte, if they
are at most 16), with a scale of 16 bits per block. Entropy: of single codes, with the scale. Error:
relative L2 over all matrices together. Gain: the factor of the least-squares fit of the result to
the input. Beside: of the elements in the other columns.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.codes.schemes import GradientCode, candidates, coded_bits
from benchmarks.convergence.quantization_schemes import zeropp_round_trip
from benchmarks.convergence.variants import FLAGS
from benchmarks.shared.benchmark import Benchmark, Flag
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.pretrain_run import run_step, silent_run, training_batches
from benchmarks.shared.table import Column, table
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.arguments import parse
from zeropp.optim.step_or_skip import local_part
from zeropp.quant.packing import ROTATED_4
from zeropp.ranks.topology import Environment

MODEL = f"{FLAGS} --hidden-size 512 --num-layers 2 --num-attention-heads 8"
COLUMNS, LARGE, FACTOR = 512, 8, 30.0
DRAWN_ROWS = 2048
ZEROPP: Mapping[str, int] = {"INT4, blocks of 128": 4, "rotated INT4": ROTATED_4, "INT3": 3}
GAIN_OF_ALL, GAIN_BESIDE = 0.005, 0.02  # how far from 1 they may be


def measure(options: argparse.Namespace, result: dict) -> None:
    """Train, verify, measure."""
    torch.set_num_threads(1)
    matrices, losses = gradients(options.steps)
    gaussian = torch.randn(DRAWN_ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    positive = gaussian.abs() / 2 + gaussian / 2
    codes = candidates()
    verify({code.name: code for code in codes}, [*matrices, gaussian])
    result |= {
        "model": MODEL, "steps": options.steps, "losses": losses,
        "elements": sum(matrix.numel() for matrix in matrices),
        "codes": [figures(code, matrices, gaussian, positive) for code in codes],
    }  # fmt: skip


def gradients(steps: Sequence[int]) -> tuple[list[Tensor], list[float]]:
    """The gradients (rows, 512) of the matrices of the blocks at these steps, and the losses."""
    words = [*MODEL.split(), "--train-iters", str(max(steps) + 1), "--eval-iters", "0"]
    config = parse([*words, "--zero-stage", "0", "--seed", "1"], 1)
    run = silent_run(config, join_ranks(Environment(), config.parallel))
    model, found, losses = run.trainer.sharding.model, [], []
    with training_batches(run) as batches:
        for step in range(max(steps) + 1):
            loss = run_step(run, batches).loss
            if step not in steps:
                continue
            losses.append(loss)
            model.zero_grad()
            run.trainer.forward_backward(batches, config.batch.global_batch_size, 1.0)
            found += [
                local_part(weight.grad).reshape(-1, COLUMNS).clone()
                for name, weight in model.named_parameters()
                if weight.dim() > 1 and name.startswith("blocks.")
            ]
            model.zero_grad()
    return found, losses


def verify(codes: Mapping[str, GradientCode], matrices: Sequence[Tensor]) -> None:
    """Raise Disagreement unless the models of zeropp's formats give the same numbers as its ops."""
    for name, bits in ZEROPP.items():
        for matrix in matrices:
            own = codes[name].round_trip(matrix).values.flatten()
            if not torch.equal(own, zeropp_round_trip(matrix.flatten(), bits)):
                raise Disagreement(f"{name}: the ops and the model differ; nothing was measured")


def figures(
    code: GradientCode, matrices: Sequence[Tensor], gaussian: Tensor, positive: Tensor
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


def large_columns() -> Tensor:
    """(512,) bool."""
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(1))
    return torch.zeros(COLUMNS, dtype=torch.bool).index_fill(0, order[:LARGE], True)


def with_large_columns(matrix: Tensor) -> Tensor:
    """The same matrix (rows, 512) with a few columns 30 times as large."""
    return torch.where(large_columns(), matrix * FACTOR, matrix)


def gain_of(exact: Tensor, result: Tensor) -> float:
    """The factor of the least-squares fit of the result to the exact values, both (n,)."""
    exact, result = exact.double(), result.double()
    return float(exact @ result / (exact @ exact))


def share(title: str, name: str) -> Column:
    """A column of per cent."""
    return Column(f"{title}, %", name, ".2f", 100)


def gain(title: str, name: str) -> Column:
    """A column of gains."""
    return Column(title, name, ".4f")


def show(result: dict) -> str:
    """All codes."""
    rows = table(
        sorted(result["codes"], key=lambda row: row["coded"]),
        Column("", "code"),
        Column("coded bits", "coded", ".3f"),
        Column("entropy", "entropy", ".3f"),
        share("error", "error"),
        gain("gain", "gain"),
        Column("with large columns: coded", "columns_coded", ".3f"),
        share("error", "columns_error"),
        gain("gain", "columns_gain"),
        share("error beside", "beside_error"),
        gain("gain beside", "beside_gain"),
        gain("Gaussian: gain beside", "gaussian_beside_gain"),
        share("zeros beside", "zeros"),
        share("positive mean: bias beside", "bias"),
        Column("keeps the gain", lambda row: "yes" if row["eligible"] else "no"),
    )
    losses = ", ".join(f"{loss:.2f}" for loss in result["losses"])
    return (
        f"Gradients of a GPT trained by pretrain_gpt.py's own step with `{result['model']}`, at "
        f"steps {', '.join(map(str, result['steps']))} (losses {losses}): {result['elements']:,} "
        f"elements of matrices. A code keeps the gain if it is within {GAIN_OF_ALL} of 1 over all "
        f"elements and within {GAIN_BESIDE} beside large columns.\n\n{rows}"
    )


BENCHMARK = Benchmark(
    spec=__spec__,
    question=__doc__,
    flags=(
        Flag("--steps", (10, 80, 240), "of training, at which gradients are taken", least=None),
    ),
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
