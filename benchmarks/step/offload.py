"""The optimizer on the host: a training step with and without it, and its update on several ranks.

train: the step of pretrain_gpt.py with fp32 weights and Adam on the device, on the host, and on the
host concurrently with the next step. The first losses and gradient norms of all three must be
equal to the last digit; then they take one step each in turn. On a GPU the table also shows the
device's peak memory, and the share of the copies' time during which a kernel ran.

ranks: the offloaded update (norm, clipping, Adam, bf16 weights) of one set of weights, sharded over
1, 2, ... ranks of this machine, which divide its cores. All update the same number of bytes, so the
slowest rank's time should be the same, too. The numbers of ranks take turns, started anew each
time.
"""

import os
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.shared.benchmark import Benchmark, Flag, Options, shape_text
from benchmarks.shared.interleaved import Disagreement, interleaved, median_of, quartiles
from benchmarks.shared.rank_processes import NO_GPUS, run_on_ranks
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.training_setup import TrainingSetup, joined_ranks, largest_of_ranks
from benchmarks.shared.zero_json import json_flag
from benchmarks.step.comparison import VERIFIED_STEPS, TimedLoop, time_in_turn
from benchmarks.step.copy_overlap import hidden_share
from benchmarks.step.training_loops import ours
from zeropp import ZeroConfig, optimizer_step, shard
from zeropp.capabilities.offload.offloaded_adam import offloaded_adamw

PARTS = ("train", "ranks")
MATRIX = 1024  # rows and columns of the weights of the part `ranks`
# Bytes of the update of one parameter: the gradient is read twice, three fp32 numbers are read and
# written, the bf16 weight is written.
UPDATE_BYTES = 34
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def measure(options: Options, result: dict) -> None:
    """Run the parts asked for."""
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
    result |= {
        "device": options.device,
        "rounds": options.rounds,
        "train": compare_steps(options) if "train" in options.parts else [],
        "ranks": compare_rank_counts(options) if "ranks" in options.parts else [],
    }


def compare_steps(options: Options) -> list[dict]:
    """A row for each place of the optimizer."""
    ranks, shape = joined_ranks(), options.shape
    delayed = {
        "zero_optimization": {"stage": 2, **OFFLOAD},
        "zeropp": {"delayed_param_update": True, "delayed_param_update_warmup": VERIFIED_STEPS},
    }
    flags = {
        "on the device": "",
        "on the host": "--cpu-optimizer --use-pin-memory",
        "on the host, beside the next step": json_flag(delayed),
    }
    setups = {
        name: TrainingSetup(shape=shape, ranks=ranks, dtype=options.dtype, stage=2, extra_flags=own)
        for name, own in flags.items()
    }
    loops = [
        TimedLoop.build(partial(ours, setup, name), setup, VERIFIED_STEPS)
        for name, setup in setups.items()
    ]
    for each in loops:
        if each.history != loops[0].history:
            raise Disagreement(f"losses and norms differ {each.name}: {each.history}")
    setup = setups[loops[0].name]
    time_in_turn(loops, setup, options.rounds)
    on_gpu = ranks.device.type == "cuda"
    tokens = shape["seq"] * shape["micro-batch"] * shape["micro-batches"]
    rows = []
    for each in loops:
        step = each.loop.step
        row = each.row(loops[0])
        row["tokens_per_s"] = tokens / row["median"]
        row["hidden_share"] = hidden_share(lambda step=step: step()()) if on_gpu else None
        rows.append(row)
        each.loop.close()
    return rows


def compare_rank_counts(options: Options) -> list[dict]:
    """A row for each number of ranks."""
    seconds: dict[int, list[float]] = {count: [] for count in options.ranks}
    for count in interleaved(list(options.ranks), options.turns):
        seconds[count] += run_on_ranks(__spec__.name, count, options, variables=NO_GPUS)
    num_bytes = UPDATE_BYTES * matrices(options) * MATRIX**2
    reference = statistics.median(next(iter(seconds.values())))
    return [
        {
            "ranks": count,
            "threads": threads_per_rank(count),
            "seconds": times,
            "gb_per_s": num_bytes / statistics.median(times) / 1e9,
            "ratio": statistics.median(times) / reference,
            "quartiles": [quartile / reference for quartile in quartiles(times)],
        }
        for count, times in seconds.items()
    ]


def threads_per_rank(num_ranks: int) -> int:
    """The threads of each rank, which divide the cores."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def matrices(options: Options) -> int:
    """The number of matrices that have as many parameters as asked for."""
    return max(1, round(options.parameters * 1e6 / MATRIX**2))


def on_rank(options: Options) -> list[float]:
    """On each rank: the slowest rank's seconds, round by round."""
    ranks = joined_ranks()
    torch.set_num_threads(threads_per_rank(ranks.num_ranks))
    config = ZeroConfig.from_json(
        {"zero_optimization": {"stage": 2, **OFFLOAD}, "bf16": {"enabled": True}}
    )
    layers = (nn.Linear(MATRIX, MATRIX, bias=False) for _ in range(matrices(options)))
    sharding = shard(nn.Sequential(*layers), ranks.mesh, config)
    groups = [{"params": list(sharding.model.parameters())}]
    optimizer = offloaded_adamw(sharding, groups, ranks.device, config)
    inputs = torch.ones(1, MATRIX, dtype=torch.bfloat16)
    seconds = []
    for _ in range(options.rounds + 1):
        with sharding.micro_step(last=True):
            sharding.model(inputs).sum().backward()
        dist.barrier()
        start = time.perf_counter()
        optimizer_step(optimizer, sharding, clip_grad=1.0)
        seconds.append(largest_of_ranks(time.perf_counter() - start, ranks.device))
    return seconds[1:]  # the first step allocates the optimizer's state


def show(result: dict) -> str:
    """A table for each part that ran."""
    parts = []
    if result["train"]:
        parts.append(f"one rank, {shape_text(result)}")
        parts.append(
            table(
                result["train"],
                Column("fp32 weights and Adam", "name"),
                Column("ms/step", median_of("seconds"), ".1f", 1e3),
                Column("tokens/s", "tokens_per_s", ".0f"),
                *RATIOS,
                Column("peak, GB", "peak_bytes", ".2f", 1e-9),
                Column("copies hidden", "hidden_share", ".0%"),
            )
        )
    if result["ranks"]:
        parts.append("the update, sharded over ranks of this machine, the slowest")
        parts.append(
            table(
                result["ranks"],
                Column("ranks", "ranks"),
                Column("threads of each", "threads"),
                Column("ms", median_of("seconds"), ".1f", 1e3),
                Column("GB/s", "gb_per_s", ".1f"),
                *RATIOS,
            )
        )
    return "\n\n".join(parts)


OPTIONS = (
    Flag("--parts", PARTS, choices=PARTS),
    Flag("--dtype", help="of `train`; default: bf16, on a CPU fp32", choices=("fp32", "bf16")),
    Flag("--rounds", 10, "timed steps of each"),
    Flag("--turns", 3, "runs of each number of ranks"),
    Flag("--ranks", (1, 2, 4), "for the part ranks"),
    Flag("--parameters", 50.0, "for the part ranks, in millions"),
)
BENCHMARK = Benchmark(
    __spec__,
    __doc__,
    measure,
    show,
    OPTIONS,
    shape={"hidden": 512, "heads": 8},
    has_device=True,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
