"""The activations of a long sequence on the ranks that share it (--context-parallel-size).

One sequence goes through a small GPT, forward and backward, in fp32. Measured are the bytes of all
tensors of a rank besides weights and tokens: those that wait for backward after the forward pass,
and the most at any time. The losses must be the same on any number of ranks.
"""

import sys
import time

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.pretrain_run import cpu_ranks, silent_run, training_batches
from benchmarks.shared.rank_processes import NO_GPUS, run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.training_setup import CPU, joined_ranks, largest_of_ranks
from megatron_zpp.planner.activations import LiveBytes
from megatron_zpp.settings.arguments import parse

MIB = 2**20
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
    "--num-workers 0 --eval-iters 0 --train-iters 1 --zero-stage 3 "
)
KINDS = {"a2a": "", "allgather": "--cp-comm-type allgather"}
TOLERANCE = 1e-5  # relative: fp32 sums in another order


def measure(options: Options, result: dict) -> None:
    """Measure on each number of ranks; raises Disagreement where the losses differ."""
    result["seq_length"], result["rows"] = options.seq_length, []
    for num_ranks in options.ranks:
        for kind in KINDS if num_ranks > 1 else ("a2a",):
            arguments = __spec__.name, num_ranks, options.seq_length, kind
            answer = run_on_ranks(*arguments, variables=NO_GPUS)
            result["rows"].append({"ranks": num_ranks, "kind": kind, **answer})
    losses = [row["loss"] for row in result["rows"]]
    if max(losses) - min(losses) > TOLERANCE * min(losses):
        raise Disagreement(f"the losses differ: {losses}")


def on_rank(seq_length: int, kind: str) -> dict:
    """Run one pass over a sequence; return the bytes of the rank with most."""
    size = joined_ranks().num_ranks
    sizes = f"--context-parallel-size {size} {KINDS[kind]}" if size > 1 else ""
    flags = f"{MODEL} --seq-length {seq_length} {sizes}"
    config = parse(flags.split(), size)
    run = silent_run(config, cpu_ranks(config))
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
    return {
        "saved": largest_of_ranks(saved, CPU),
        "peak": largest_of_ranks(live.peak, CPU),
        "loss": mean,
        "seconds": seconds,
    }


def show(result: dict) -> str:
    """A line for each number of ranks."""
    whole = result["rows"][0]["saved"]
    rows = table(
        result["rows"],
        Column("ranks", "ranks"),
        Column("kind", lambda row: row["kind"] if row["ranks"] > 1 else None),
        Column("saved, MiB", "saved", ".1f", 1 / MIB),
        Column("peak, MiB", "peak", ".1f", 1 / MIB),
        Column("saved, of one rank's", lambda row: row["saved"] / whole, ".3f"),
        Column("loss", "loss", ".6f"),
        Column("seconds", "seconds", ".0f"),
    )
    return f"one sequence of {result['seq_length']:,} tokens\n\n{rows}"


OPTIONS = (Flag("--seq-length", 32768), Flag("--ranks", (1, 2, 4)))
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
