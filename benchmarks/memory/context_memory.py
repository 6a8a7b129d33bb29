"""The activations of a long sequence on the ranks that share it (--context-parallel-size).

    python -m benchmarks.memory.context_memory [--seq-length 32768] [--ranks 1 2 4]

One sequence goes through a small GPT, forward and backward, in fp32. Measured are the bytes of all
tensors of a rank besides weights and tokens: those that wait for backward after the forward pass,
and the most at any time. The losses must be the same on any number of ranks.
"""

import argparse
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.convergence.parallel_losses import CPU, FLAGS, GATHERED, Meshes, open_run
from benchmarks.shared.pretrain_run import training_batches
from benchmarks.shared.rank_launch import run_on_ranks, write_answer
from benchmarks.shared.result import begin, benchmark_parser, finish, heading, markdown_table
from benchmarks.shared.training_setup import largest_of_ranks
from megatron_zpp.planner.activations import LiveBytes
from zeropp.ranks.process_group import start_process_group
from zeropp.ranks.topology import Environment

MIB = 2**20
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
    "--num-workers 0 --eval-iters 0 --train-iters 1 --zero-stage 3 "
)
KINDS = {"a2a": "", "allgather": GATHERED}


def main() -> int:
    """Measure on each number of ranks and print the table, or be one of the ranks."""
    options = read_options()
    if options.on_ranks is not None:
        measure(options)
        return 0
    result = begin(__spec__.name)
    result["seq_length"], result["rows"] = options.seq_length, []
    for num_ranks in options.ranks:
        for kind in KINDS if num_ranks > 1 else ("a2a",):
            arguments = ["--seq-length", str(options.seq_length), "--kind", kind]
            answer = run_on_ranks(__spec__.name, num_ranks, arguments)
            result["rows"].append({"ranks": num_ranks, "kind": kind, **answer})
    finish(result, show, options.json)
    losses = [row["loss"] for row in result["rows"]]
    return int(max(losses) - min(losses) > 1e-5 * min(losses))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seq-length", type=int, default=32768, metavar="N")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--kind", choices=KINDS, default="a2a", help=argparse.SUPPRESS)
    parser.add_argument("--on-ranks", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Run one pass over a sequence; rank 0 writes the bytes of the rank with most."""
    environment = Environment.read()
    torch.set_num_threads(1)
    start_process_group(environment, CPU, timedelta(minutes=10), "gloo")
    size = environment.world_size
    sizes = f"{FLAGS['cp']} {size} {KINDS[options.kind] if size > 1 else ''}"
    flags = f"{MODEL} --seq-length {options.seq_length} {sizes}"
    run = open_run(flags, environment, Meshes())
    run.trainer.sharding.model.train()
    with training_batches(run) as batches:
        batch = next(batches)
    began = time.perf_counter()
    inputs = batch.inputs()
    tensors = [each for each in inputs if each is not None]
    with LiveBytes([*run.trainer.sharding.model.parameters(), *tensors]) as live:
        loss = run.trainer.sharding.model(*inputs)
        saved = live.current
        loss.backward()
    seconds = time.perf_counter() - began
    mean = run.ranks.sum(float(loss.detach()))[0] / size
    answer = {"saved": largest_of_ranks(saved, CPU), "peak": largest_of_ranks(live.peak, CPU)}
    if environment.rank == 0:
        write_answer(options.on_ranks, answer | {"loss": mean, "seconds": seconds})
    dist.destroy_process_group()


def show(result: dict) -> None:
    """Print a line for each number of ranks."""
    print(heading(result, "torch"))
    print(f"one sequence of {result['seq_length']:,} tokens")
    whole = result["rows"][0]
    lines = [
        [
            str(row["ranks"]), row["kind"] if row["ranks"] > 1 else "",
            *(f"{row[name] / MIB:.1f}" for name in ("saved", "peak")),
            f"{row['saved'] / whole['saved']:.3f}", f"{row['loss']:.6f}", f"{row['seconds']:.0f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    columns = "ranks", "kind", "saved, MiB", "peak, MiB", "saved, of one rank's", "loss", "seconds"
    print(markdown_table(columns, lines))


if __name__ == "__main__":
    sys.exit(main())
