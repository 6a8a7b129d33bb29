"""How long a training step takes with Muon beside AdamW, and how many bytes of state each holds.

The step of pretrain_gpt.py, at stage 3 on ranks in two nodes: AdamW, and Muon whose blocks are the
rows of a node or of a rank. Before anything is timed, the losses and gradient norms of the first
step must be AdamW's to the last digit, and the first update of every block must be the
orthogonalized momentum of its rows, taken from the whole matrix. Then all take one step each in
turn. Beside the ratio of the times stands that of the operations: Newton-Schulz iterations of the
rank that has most, over those of the model for a rank's tokens.
"""

import dataclasses
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shared.benchmark import Benchmark, Flag, Options, shape_text
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.rank_processes import run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.training_setup import (
    CPU,
    DTYPES,
    TrainingSetup,
    joined_ranks,
    largest_of_ranks,
)
from benchmarks.shared.zero_json import json_flag, zero_json
from benchmarks.step.comparison import LOOP_COLUMNS, TimedLoop, time_in_turn
from benchmarks.step.training_loops import TrainingLoop, ours
from megatron_zpp.model.flops import flops_per_token
from zeropp.capabilities.muon.blocks import group_of, rows_within, shard_rows
from zeropp.capabilities.muon.matrix_step import MOMENTUM, cpu_has_bf16
from zeropp.capabilities.muon.newton_schulz import orthogonalize, scale
from zeropp.errors import InputError
from zeropp.optim.sharded_optimizer import sharded
from zeropp.optim.step_or_skip import local_part

ADAMW, LOOPS = "AdamW", ("AdamW", "Muon, node", "Muon, rank")
MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov"
NODES = 2
# Rows of another block have an update of their own, about as far away as it is long; products in
# bf16 in another order, 15 of them, each off by some 2^-9 of its length, come to 0.03.
FAR = 0.1


def check(options: Options) -> None:
    """Raise InputError for ranks that are not two nodes, and tokens that are no micro-batches."""
    if options.ranks % NODES:
        raise InputError(f"--ranks {options.ranks}: expected a multiple of {NODES}, the nodes")
    step = options.shape["seq"] * options.shape["micro-batch"]
    if wrong := [str(tokens) for tokens in options.tokens if tokens % step or not tokens]:
        raise InputError(
            f"--tokens {' '.join(wrong)}: expected multiples of --seq x --micro-batch, {step}"
        )


def measure(options: Options, result: dict) -> None:
    """Compare the optimizers on ranks of this machine."""
    result["rounds"] = options.rounds
    result["comparisons"] = run_on_ranks(
        __spec__.name, options.ranks, options, ranks_per_node=options.ranks // NODES
    )


def on_rank(options: Options) -> list[dict]:
    """This rank's part of the comparison at each number of tokens."""
    ranks, answers = joined_ranks(), []
    for tokens in options.tokens:
        count = tokens // (options.shape["seq"] * options.shape["micro-batch"])
        shape = {**options.shape, "micro-batches": count}
        setup = TrainingSetup(shape=shape, ranks=ranks, dtype=options.dtype)
        answers.append(compare(setup, tokens, options.rounds))
    return answers


def compare(setup: TrainingSetup, tokens: int, rounds: int) -> dict:
    """Verify the first step of each optimizer, and time one of each in turn."""
    verified, timed = {}, []
    for name in LOOPS:
        loop = ours(with_optimizer(setup, name), name)
        before = {key: whole(each).clone() for key, each in loop.model.named_parameters()}
        numbers = loop.step()()
        timed.append(TimedLoop(loop=loop, history=[numbers]))
        if timed[0].history != timed[-1].history:
            raise Disagreement(f"{name}: the first loss and norm are {numbers}, not AdamW's")
        if name != ADAMW:
            verified[name] = distance_of_updates(loop, before)
            if not verified[name] <= FAR:
                raise Disagreement(
                    f"{name}: updates differ from the orthogonalized momentum of their blocks by "
                    f"{verified[name]:.2e} of its length, allowed {FAR}; they were not timed"
                )
    time_in_turn(timed, setup, rounds)
    config = setup.config
    model_flops = tokens * flops_per_token(config.model, config.recompute, setup.vocab_size)
    rows = [
        {
            **each.row(timed[0]),
            "operations": operations(each.loop) / model_flops,
            "state_bytes": state_bytes(each.loop),
        }
        for each in timed
    ]
    for each in timed:
        each.loop.close()
    threads = torch.get_num_threads()
    return {"tokens": tokens, "threads": threads, "verified": verified, "loops": rows}


def with_optimizer(setup: TrainingSetup, name: str) -> TrainingSetup:
    """The setup of one of `LOOPS`."""
    zero = zero_json("zero3", setup.ranks.num_ranks // NODES)
    flags = "--optimizer adam"
    if name != ADAMW:
        flags, zero["zeropp"]["muon_blocks"] = MUON, name.removeprefix("Muon, ")
    return dataclasses.replace(setup, extra_flags=f"{flags} {json_flag(zero)}")


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which ranks have shards, without its graph."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance_of_updates(loop: TrainingLoop, before: dict[str, Tensor]) -> float:
    """The largest L2 distance of a block's first update to what it should be, over its length."""
    largest = 0.0
    groups = [group for group in loop.optimizer.param_groups if group["use_muon"]]
    names = {parameter: name for name, parameter in loop.model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            decayed = before[names[parameter]] * (1 - group["lr"] * group["weight_decay"])
            moved = (decayed - whole(parameter)) / group["lr"]
            for rows, expected in expected_updates(loop, parameter, group):
                difference = (moved[rows] - expected).norm() / expected.norm()
                largest = max(largest, difference.item())
    return largest


def expected_updates(
    loop: TrainingLoop, parameter: Tensor, group: dict
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each block of a matrix, and their update after one step from no momentum."""
    matrices, mu = loop.optimizer.matrices, group["momentum"]
    momentum = whole(loop.optimizer.state[parameter][MOMENTUM])
    sent = (momentum / (1 - mu)).lerp(momentum, mu).bfloat16()  # Nesterov's
    axis, matrix = matrices.axis(parameter), matrices.matrix(parameter)
    size, num_ranks = group_of(axis, matrices.options.blocks).size, axis.size
    shards = [shard_rows(matrix.shape[0], num_ranks, place) for place in range(num_ranks)]
    for first in range(0, num_ranks, size):
        start, stop = shards[first][0], shards[first + size - 1][1]
        for part in matrix.parts:
            runs = rows_within(part.runs, (start, stop))
            if not runs:
                continue
            rows = torch.cat([torch.arange(start + a, start + b) for a, b in runs])
            block = sent[rows] if cpu_has_bf16() else sent[rows].float()
            update = orthogonalize(block, group["ns_coefficients"], group["eps"]).float()
            update *= group["extra_scale_factor"]
            yield rows, update * scale(part.shape, group["scale_mode"])


def operations(loop: TrainingLoop) -> float:
    """The operations of the Newton-Schulz iterations of the rank that has most; AdamW has none."""
    return largest_of_ranks(sharded(loop.optimizer).flops() or 0, CPU)


def state_bytes(loop: TrainingLoop) -> float:
    """Bytes of state of a parameter of the blocks' matrices, counted on all ranks' shards."""
    matrices = [
        each
        for name, each in loop.model.named_parameters()
        if name.startswith("blocks.") and each.ndim == 2
    ]
    counts = [0.0, 0.0]
    for parameter in matrices:
        state = loop.optimizer.state[parameter].values()
        counts[0] += sum(local_part(each).nbytes for each in state if each.ndim)
        counts[1] += local_part(parameter).numel()
    sums = torch.tensor(counts, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def show(result: dict) -> str:
    """A table for each number of tokens."""
    parts = [f"shape: {shape_text(result)}, but as many micro-batches as the tokens take"]
    for each in result["comparisons"]:
        verified = ", ".join(f"{name} {far:.1e}" for name, far in each["verified"].items())
        parts.append(f"{each['tokens']:,} tokens per rank; updates differ by: {verified}")
        columns = (
            Column("operations", "operations", "+.1%"),
            Column("bytes of state", "state_bytes", ".2f"),
        )
        parts.append(table(each["loops"], *LOOP_COLUMNS, *columns))
    return "\n\n".join(parts)


OPTIONS = (
    Flag("--tokens", (4096, 1024), "of a step, on each rank"),
    Flag("--dtype", "fp32", "of the products of the model", choices=tuple(DTYPES)),
    Flag("--ranks", 4, "in two nodes", least=NODES),
    Flag("--rounds", 12, "timed steps of each"),
)
BENCHMARK = Benchmark(
    __spec__,
    __doc__,
    measure,
    show,
    OPTIONS,
    shape={"hidden": 512, "heads": 8, "seq": 256, "micro_batch": 2},
    check=check,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
