"""Does a training step wait for its samples? The loader beside batches that are in memory.

The step is that of pretrain_gpt.py on one rank: the default model on the default text, or with the
FLAGs after `--`. One model is trained; in turn its batches come from memory and from a loader with
each number of workers. All must yield equal batches, or nothing is timed.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement, interleaved, median_of, ratio_summary
from benchmarks.shared.pretrain_run import run_step, silent_run, training_batches
from benchmarks.shared.table import RATIOS, Column, table
from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.run import Run
from zeropp.ranks.topology import Environment

MEMORY = "in memory"
WARM_UP = 2  # steps with each
COMPARED_BATCHES, STORED_BATCHES = 4, 16
SILENT_FLAGS = (
    "--eval-iters 0 --log-interval 1000000 --train-iters 1000000 --lr-decay-style constant"
)


class InMemory:
    """Stored batches, repeated, with the interface of a `Loader`."""

    def __init__(self, batches: Sequence[Batch], step: int) -> None:
        self._batches, self._step = batches, step
        self.consumed_samples, self.waited = 0, 0.0

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = self._batches[self.consumed_samples // self._step % len(self._batches)]
        self.waited += time.perf_counter() - started
        self.consumed_samples += self._step
        return batch


def measure(options: Options, result: dict) -> None:
    """Build the run, verify, time."""
    config = parse([*SILENT_FLAGS.split(), *options.flags], 1)
    run = silent_run(config, join_ranks(Environment.read(), config.parallel))
    result |= {
        "parameters": run.trainer.sharding.model.num_parameters(),
        "seq_length": config.model.seq_length,
        "micro_batch_size": config.batch.micro_batch_size,
        "steps": time_steps(run, options.workers, options.rounds),
    }


def time_steps(run: Run, workers: Sequence[int], rounds: int) -> list[dict]:
    """Seconds of steps and of waiting for the loader, with batches from memory and each loader."""
    with ExitStack() as stack:
        sources = {MEMORY: in_memory(run)}
        for count in workers:
            sources[f"{count} workers"] = stack.enter_context(verified_loader(run, count))
        for name in interleaved(list(sources), WARM_UP):
            run_step(run, sources[name])
        rows = {name: {"name": name, "seconds": [], "waited": []} for name in sources}
        for name in interleaved(list(sources), rounds):
            before = sources[name].waited
            rows[name]["seconds"].append(run_step(run, sources[name]).seconds)
            rows[name]["waited"].append(sources[name].waited - before)
    return list(rows.values())


def verified_loader(run: Run, workers: int) -> Loader:
    """A loader from the first sample on; Disagreement unless it begins as batches in memory do."""
    loader = training_batches(with_workers(run, workers))
    expected = in_memory(run)
    for number in range(COMPARED_BATCHES):
        pairs = zip(next(loader).inputs(), next(expected).inputs(), strict=True)
        if not all(a is b is None or torch.equal(a, b) for a, b in pairs):
            raise Disagreement(f"batch {number} with {workers} workers differs; nothing was timed")
    return loader


def in_memory(run: Run) -> InMemory:
    """The first batches of training, read by this process."""
    step = run.config.batch.micro_batch_size * run.ranks.num_ranks
    with training_batches(with_workers(run, 0)) as batches:
        return InMemory([next(batches) for _ in range(STORED_BATCHES)], step)


def with_workers(run: Run, workers: int) -> Run:
    """The run with another number of loader processes."""
    data = dataclasses.replace(run.config.data, num_workers=workers)
    return dataclasses.replace(run, batches=dataclasses.replace(run.batches, data=data))


def show(result: dict) -> str:
    """Medians over the rounds, and ratios round by round."""
    memory = result["steps"][0]["seconds"]
    rows = [row | ratio_summary(row["seconds"], memory) for row in result["steps"]]
    steps = table(
        rows,
        Column("step fed", "name"),
        Column("median, ms", median_of("seconds"), ".1f", 1e3),
        *RATIOS,
        Column("wait, us", median_of("waited"), ".0f", 1e6),
        Column(
            "of step", lambda row: median_of("waited")(row) / median_of("seconds")(row), ".2%"
        ),
    )  # fmt: skip
    return (
        f"{result['parameters'] / 1e6:.2f} M parameters, micro-batch of "
        f"{result['micro_batch_size']} x {result['seq_length']} tokens; batches equal\n\n"
        f"{steps}"
    )


OPTIONS = (
    Flag("--workers", (0, 1, 2), "of the loaders"),
    Flag("--rounds", 40, "timed steps of each"),
    Flag("flags", (), "of pretrain_gpt.py, after --"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
