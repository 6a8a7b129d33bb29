"""Does a training step wait for its samples? The loader beside batches that are in memory already.

    python benchmarks/data/loader.py [--workers N ...] [--rounds N] [--json FILE] [-- FLAG ...]

The step is that of pretrain_gpt.py on one rank without any flag, the default model on the default
text, or with the FLAGs after `--`. One model is trained; in turn its batches come from memory and
from a loader with each number of workers. All must bring equal batches, or nothing is timed. Beside
it: how many tokens per second a loader brings when nothing else runs, and a plain DataLoader over
the same tokens in one array.
"""

import argparse
import dataclasses
import io
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.shared.result import add_json, begin, finish, heading  # noqa: E402
from megatron_zpp.data.loader import Batch, Loader  # noqa: E402
from megatron_zpp.monitor.console import Console  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.settings.arguments import parse  # noqa: E402
from megatron_zpp.train.build import build_run  # noqa: E402
from megatron_zpp.train.loop import TRAIN, loader  # noqa: E402
from megatron_zpp.train.run import Run  # noqa: E402
from megatron_zpp.train.step import train_step  # noqa: E402
from megatron_zpp.train.stop import Stopping  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402

MEMORY = "in memory"
WARM_UP = 2  # steps of each
ALONE_SECONDS = 2.0  # of each loader without a training step
QUIET = "--eval-iters 0 --log-interval 1000000 --train-iters 1000000 --lr-decay-style constant"


class InMemory:
    """Batches made before the clock starts, over and over, in the shape of a `Loader`."""

    def __init__(self, batches: Sequence[Batch], step: int) -> None:
        self._batches, self._step = batches, step
        self.consumed_samples, self.waited = 0, 0.0

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = self._batches[self.consumed_samples // self._step % len(self._batches)]
        self.waited += time.perf_counter() - started
        self.consumed_samples += self._step
        return batch


class PlainSamples(Dataset):
    """What a person would write over one array of tokens: sample i is tokens i S to i S + S."""

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self._tokens, self._length = tokens, seq_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self._length
        text = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return {"tokens": text[:-1], "labels": text[1:]}


def main() -> int:
    """Assemble the run, verify, take turns, print a table."""
    options, flags = read_options()
    result = begin("loader")
    config = parse([*QUIET.split(), *flags], 1)
    ranks = join_ranks(Environment.read(), config.parallel)
    console = Console(0, io.StringIO(), interactive=False)
    run = build_run(config, ranks, console, Stopping(config.training))
    result |= {
        "parameters": run.sharding.model.num_parameters(),
        "seq_length": config.model.seq_length,
        "micro_batch_size": config.batch.micro_batch_size,
        "steps": in_turn(run, options.workers, options.rounds),
        "alone": alone(run, options.workers),
    }
    torch.distributed.destroy_process_group()
    finish(result, show, options.json)
    return 0


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the flags of pretrain_gpt.py after `--`."""
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each (default: 40)")
    add_json(parser)
    return parser.parse_args(own.split()), flags.split()


def in_turn(run: Run, workers: Sequence[int], rounds: int) -> list[dict]:
    """Steps fed from memory and by each loader, one of each in turn, in an order that turns round.

    Returns for each of them the seconds of its steps and those spent in the loader.
    """
    with ExitStack() as stack:
        feeds = {f"{n} workers": stack.enter_context(started(run, n)) for n in workers}
        feeds = {MEMORY: in_memory(run), **feeds}
        rows = {name: {"name": name, "seconds": [], "waited": []} for name in feeds}
        for number in range(-WARM_UP, rounds):
            for name in list(feeds)[:: -1 if number % 2 else 1]:
                before = feeds[name].waited
                seconds = train_step(run, feeds[name]).result().seconds
                if number >= 0:
                    rows[name]["seconds"].append(seconds)
                    rows[name]["waited"].append(feeds[name].waited - before)
    return list(rows.values())


def alone(run: Run, workers: Sequence[int]) -> list[dict]:
    """Tokens per second that a loader brings when nothing else runs, and a plain DataLoader."""
    rows = []
    for count in workers:
        with started(run, count) as batches:
            rows.append({"name": f"{count} workers"} | drained(batches))
    source = run.datasets[TRAIN].source
    tokens = np.memmap(source.bin_path, dtype=source.dtype, mode="r")
    samples = PlainSamples(tokens, run.config.model.seq_length)
    for count in workers:
        plain = DataLoader(samples, run.config.batch.micro_batch_size, num_workers=count)
        rows.append({"name": f"plain DataLoader, {count} workers"} | drained(iter(plain)))
    return rows


def drained(batches) -> dict[str, float]:
    """Tokens per second of wall and of this process's CPU time, after the first few batches."""
    for _ in range(8):
        next(batches)
    start, cpu, tokens = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - start < ALONE_SECONDS:
        if (batch := next(batches, None)) is None:  # a plain DataLoader ends with its epoch
            break
        tokens += (batch["tokens"] if isinstance(batch, dict) else batch.tokens).numel()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"tokens_per_second": tokens / seconds, "own_cpu_share": cpu / seconds}


def started(run: Run, workers: int) -> Loader:
    """A loader of training samples from the first on; exits unless its batches are the right ones.

    The first ones are compared with what the rank itself reads.
    """
    data = dataclasses.replace(run.config.data, num_workers=workers)
    config = dataclasses.replace(run.config, data=data)
    made = loader(dataclasses.replace(run, config=config), TRAIN, 0)
    expected = in_memory(run)
    for number in range(4):
        pairs = zip(next(made).inputs(), next(expected).inputs(), strict=True)
        if not all(a is b is None or torch.equal(a, b) for a, b in pairs):
            sys.exit(f"error: batch {number} by {workers} workers differs; nothing was timed")
    return made


def in_memory(run: Run) -> InMemory:
    """The first batches of training, straight from the dataset."""
    step = run.config.batch.micro_batch_size * run.ranks.num_ranks
    data = dataclasses.replace(run.config.data, num_workers=0)
    config = dataclasses.replace(run.config, data=data)
    with loader(dataclasses.replace(run, config=config), TRAIN, 0) as batches:
        return InMemory([next(batches) for _ in range(16)], step)


def show(result: dict) -> None:
    """Print the table: medians over the rounds, and ratios round by round."""
    print(
        f"{heading(result, 'torch')}\n"
        f"{result['parameters'] / 1e6:.2f} M parameters, micro-batch of "
        f"{result['micro_batch_size']} x {result['seq_length']} tokens; batches equal\n\n"
        f"  {'step fed':16} {'median ms':>10} {'ratio':>7}   {'its quartiles':16} "
        f"{'wait, us':>9} {'of step':>8}"
    )
    memory = result["steps"][0]["seconds"]
    for row in result["steps"]:
        seconds, waited = statistics.median(row["seconds"]), statistics.median(row["waited"])
        ratios = [a / b for a, b in zip(row["seconds"], memory, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {row['name']:16} {1e3 * seconds:10.1f} {middle:7.3f}   {low:.3f} to {high:.3f}   "
            f"{1e6 * waited:9.0f} {waited / seconds:8.2%}"
        )
    print(f"\n  {'alone':30} {'M tokens/s':>11} {'own CPU':>8}")
    for row in result["alone"]:
        print(
            f"  {row['name']:30} {row['tokens_per_second'] / 1e6:11.2f} {row['own_cpu_share']:8.0%}"
        )


if __name__ == "__main__":
    sys.exit(main())
