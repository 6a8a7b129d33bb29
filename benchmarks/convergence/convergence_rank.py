"""One rank of one run of `benchmarks/convergence/convergence.py`: trains an arm, and rank 0 writes what came.

    python benchmarks/convergence/convergence_rank.py ORDER.json ANSWER.json     (on every rank)
"""

import io
import json
import statistics
import sys
import time
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from benchmarks.convergence.arms import EVAL_MICRO_BATCH, Recipe  # noqa: E402
from megatron_zpp.data.loader import Loader  # noqa: E402
from megatron_zpp.monitor.console import Console  # noqa: E402
from megatron_zpp.parallel.mesh import join_ranks  # noqa: E402
from megatron_zpp.train.build import build_run  # noqa: E402
from megatron_zpp.train.evaluate import evaluate  # noqa: E402
from megatron_zpp.train.loop import TRAIN, VALIDATION, loader  # noqa: E402
from megatron_zpp.train.run import Run, is_due  # noqa: E402
from megatron_zpp.train.step import train_step  # noqa: E402
from megatron_zpp.train.stop import Stopping  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402
from zeropp.ranks.coordination import report_once  # noqa: E402
from zeropp.ranks.process_group import exit_process  # noqa: E402
from zeropp.ranks.topology import Environment  # noqa: E402


def main() -> int:
    """Train as the order says; returns the exit status."""
    order, answer = (Path(name) for name in sys.argv[1:])
    wanted = json.loads(order.read_text())
    recipe = Recipe(**wanted["recipe"])
    environment = Environment.read()
    try:
        config = recipe.config(wanted["arm"], wanted["seed"])
        ranks = join_ranks(environment, config.parallel)
        console = Console(ranks.rank, io.StringIO(), interactive=False)
        run = build_run(config, ranks, console, Stopping(config.training))
        found = train_arm(run, recipe)
    except InputError as mistake:
        message = f"error: {mistake}"
        report_once(environment, lambda: print(message, file=sys.stderr))
        return 2
    if ranks.rank == 0:
        write_atomically(answer, lambda file: file.write(json.dumps(found).encode()))
    dist.destroy_process_group()
    return 0


def train_arm(run: Run, recipe: Recipe) -> dict:
    """Every training loss, the held-out loss now and then, times, and bytes by the ledger.

    `node_bytes` are those a node sends per training step, by "purpose/hop", without evaluations.
    """
    batches, seconds, training = loader(run, TRAIN, 0), [], []
    held_out = [(0, held_out_loss(run, recipe))]
    for iteration in range(1, recipe.steps + 1):
        started = time.perf_counter()
        done = train_step(run, batches).result()
        seconds.append(time.perf_counter() - started)
        training.append(done.loss)
        if is_due(iteration, recipe.eval_interval) or iteration == recipe.steps:
            held_out.append((iteration, held_out_loss(run, recipe)))
            report(run, iteration, training[-1], held_out[-1][1])
    communication = done.communication  # of all steps: the log's interval is the whole run
    batch = run.config.batch
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * recipe.ranks)
    return {
        "parameters": run.sharding.model.num_parameters(),
        "collectives": [list(row) for row in run.sharding.describe(micro_batches)],
        "training": training,
        "held_out": held_out,
        "step_seconds": statistics.median(seconds),
        "node_bytes": {
            "/".join(key): num_bytes / communication.steps
            for key, num_bytes in communication.sent.items()
        },
    }


def held_out_loss(run: Run, recipe: Recipe) -> float:
    """Mean loss in nats per token over the first `eval_samples` of the validation split."""
    batches = Loader(
        run.datasets[VALIDATION],
        run.config.data,
        consumed_samples=0,
        micro_batch_size=EVAL_MICRO_BATCH,
        rank=run.ranks.rank,
        world=run.ranks.num_ranks,
        eod=run.tokenizer.eod,
    )
    rounds = recipe.eval_samples // (EVAL_MICRO_BATCH * run.ranks.num_ranks)
    loss = evaluate(run.sharding, run.ranks, batches, rounds)
    batches.close()
    return loss


def report(run: Run, iteration: int, training: float, held_out: float) -> None:
    """A line of progress on rank 0."""
    if run.ranks.rank == 0:
        text = f"  iteration {iteration}: training loss {training:.4f}, held-out {held_out:.4f}"
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_process(main())
