"""What ZeRO++ on the data axis does to gradients and losses, at sizes of the other axes.

    python -m benchmarks.convergence.parallel_zeropp [--steps 100] [--sizes tp2 "pp2 v2"]

A GPT-2 is trained on the text of Python's standard library at ZeRO stage 3, in fp32, with the same
sizes twice: with nothing quantized, and with qwZ, qgZ and, where a node has several ranks, hpZ. The
gain is that of the first gradient, the projection on the exact one: 1 if quantization takes nothing
away and adds nothing on average. Losses are means over the last fifth of the steps. Bytes are those
of the ledger.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.cluster.configurations import AXES
from benchmarks.shared.benchmark import Benchmark, Flag
from benchmarks.shared.pretrain_run import (
    Meshes,
    cpu_ranks,
    join_cpu_ranks,
    run_step,
    silent_run,
    training_batches,
)
from benchmarks.shared.rank_launch import run_on_ranks
from benchmarks.shared.table import Column, table
from benchmarks.shared.zero_json import zero_json
from megatron_zpp.monitor.communication import Communication
from megatron_zpp.settings.arguments import parse
from megatron_zpp.train.run import Run
from zeropp.optim.step import own_gradients
from zeropp.ranks.topology import Environment

FLAGS = {**AXES, "v": "--num-virtual-stages-per-pipeline-rank"}
SPECIAL = {"gathered": "--cp-comm-type allgather", "sp": "--sequence-parallel"}
GLOBAL_BATCH = 16
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --num-workers 0 "
    "--eval-iters 0 --lr-decay-style constant "
    f"--global-batch-size {GLOBAL_BATCH} "
)
# (ranks, ranks of a node) by sizes: the data axis of each crosses nodes.
PLACES = {
    "": (4, 2), "tp2": (4, 2), "tp2 sp": (4, 2), "pp2": (4, 1), "pp2 v2": (4, 1), "cp2": (4, 2),
    "cp2 gathered": (4, 2), "tp2 sp pp2": (8, 2), "pp2 cp2": (8, 2),
}  # fmt: skip


def measure(options: argparse.Namespace, result: dict) -> None:
    """Train at all sizes."""
    result["steps"] = options.steps
    result["rows"] = []
    for sizes in options.sizes:
        arguments = ["--steps", str(options.steps), "--sizes", sizes]
        num_ranks, per_node = PLACES[sizes]
        row = run_on_ranks(__spec__.name, num_ranks, arguments)
        result["rows"].append({"sizes": sizes, "ranks": num_ranks, "node": per_node, **row})


def compare(options: argparse.Namespace) -> dict:
    """Train with and without ZeRO++ on these ranks."""
    environment, meshes = join_cpu_ranks(), Meshes()
    (sizes,) = options.sizes
    _, per_node = PLACES[sizes]
    name = "zeropp" if per_node > 1 else "no-hpz"
    flags = f"{MODEL} {flags_of(sizes)} --train-iters {options.steps} "
    flags += f"--log-interval {options.steps}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zero.json"
        runs = []
        for variant in ("zero3", name):
            path.write_text(json.dumps(zero_json(variant, per_node)))
            runs.append(open_run(f"{flags} --deepspeed_config {path}", environment, meshes))
    exact, quantized = runs
    row = {"gain": gain(exact, quantized)}
    row["loss"], _ = last_losses(exact, options.steps)
    row["zeropp loss"], sent = last_losses(quantized, options.steps)
    return row | {"sent": sum(sent.sent.values()), "expected": sum(sent.expected.values())}


def flags_of(sizes: str) -> str:
    """The flags of a row's sizes, as in "tp2 sp pp2"."""
    words = []
    for size in sizes.split():
        letters = size.rstrip("0123456789")
        words.append(SPECIAL.get(size) or f"{FLAGS[letters]} {size.removeprefix(letters)}")
    return " ".join(words)


def open_run(flags: str, environment: Environment, meshes: Meshes) -> Run:
    """Return a run before its first step; `meshes` are those made so far, by their sizes."""
    config = parse(flags.split(), environment.world_size)
    return silent_run(config, cpu_ranks(config, environment, meshes))


def gain(exact: Run, quantized: Run) -> float:
    """Return <q, g> / <g, g> of the gradients of the first global batch."""
    parts = []
    for run in (exact, quantized):
        with training_batches(run) as batches:
            run.trainer.forward_backward(batches, GLOBAL_BATCH, 1.0)
        parts.append(
            [(owner, part.clone()) for owner, part in own_gradients(run.trainer.optimizer)]
        )
        run.trainer.optimizer.zero_grad()
        run.trainer.communication.take()
    products = torch.zeros(2, dtype=torch.float64)
    for (owner, g), (_, q) in zip(*parts, strict=True):
        copies = exact.trainer.sharding.grid.num_copies(owner)
        products += torch.stack([(q.double() * g).sum(), g.double().square().sum()]) / copies
    product, square = exact.ranks.sum_tensor(products).tolist()
    return product / square


def last_losses(run: Run, steps: int) -> tuple[float, Communication]:
    """Train; return the mean loss of the last fifth, and the bytes that a node has sent."""
    with training_batches(run) as batches:
        iterations = [run_step(run, batches) for _ in range(steps)]
    losses = [iteration.loss for iteration in iterations[-max(1, steps // 5) :]]
    return statistics.mean(losses), iterations[-1].communication


def show(result: dict) -> str:
    """A line for each of the sizes."""
    return table(
        result["rows"],
        Column("sizes", lambda row: row["sizes"] or "none"),
        Column("ranks", lambda row: f"{row['ranks']} in nodes of {row['node']}"),
        Column("gain", "gain", ".4f"),
        Column("loss", "loss", ".4f"),
        Column("with ZeRO++", "zeropp loss", ".4f"),
        Column("differs by", lambda row: row["zeropp loss"] / row["loss"] - 1, "+.2%"),
        Column("bytes, to formula", lambda row: row["sent"] / row["expected"] - 1, "+.2%"),
    )


BENCHMARK = Benchmark(
    spec=__spec__,
    question=__doc__,
    flags=(
        Flag("--steps", 100, least=1),
        Flag("--sizes", tuple(PLACES), choices=tuple(PLACES)),
    ),
    measure=measure,
    on_rank=compare,
    show=show,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
