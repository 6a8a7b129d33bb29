"""What a rank does in one run of benchmarks.convergence.convergence."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.convergence.variants import EVAL_MICRO_BATCH, SPIKE, SPIKE_FACTOR, Recipe
from benchmarks.shared.pretrain_run import held_out_loss, run_step, silent_run, training_batches
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.parallel.replicas import joining_of
from megatron_zpp.settings.scheduled_values import is_due
from megatron_zpp.train.run import Run
from zeropp.ranks.topology import Environment


def build_variant(variant: str, seed: int, recipe: Recipe) -> Run:
    """Join the ranks, and build what they train."""
    config = recipe.config(variant, seed)
    environment, per_node = Environment.read(), config.zero.zeropp.ranks_per_node
    joining = joining_of(config.zero, config.checkpoint, config.parallel, environment, {})
    ranks = join_ranks(environment, config.parallel, per_node, joining=joining)
    run = silent_run(config, ranks)
    if not recipe.lr_spike:
        return run
    batch_size, schedules = config.batch.global_batch_size, run.trainer.schedules
    rate = SpikedLearningRate(schedules.learning_rate, recipe.lr_spike, batch_size)
    trainer = replace(run.trainer, schedules=replace(schedules, learning_rate=rate))
    return replace(run, trainer=trainer)


class SpikedLearningRate:
    """A learning rate, by samples, that is multiplied for `SPIKE` iterations from one on."""

    def __init__(self, rate: Callable[[int], float], iteration: int, batch_size: int) -> None:
        first = (iteration - 1) * batch_size
        self.rate, self.samples = rate, range(first, first + SPIKE * batch_size)

    def __call__(self, scheduled_samples: int) -> float:
        """The learning rate of the step after so many samples."""
        factor = SPIKE_FACTOR if scheduled_samples in self.samples else 1.0
        return factor * self.rate(scheduled_samples)


def train_variant(run: Run, recipe: Recipe) -> dict:
    """All training losses, held-out losses at intervals, times, and bytes of the traffic ledger.

    `node_bytes` are those a node sends per training step, by "purpose/hop", without evaluations.
    `bits` are those of a weight and of a gradient in coded messages between nodes, if any is coded.
    """
    batches, seconds, training = training_batches(run), [], []
    held_out = [(0, held_out_loss_of(run, recipe))]
    for iteration in range(1, recipe.steps + 1):
        started = time.perf_counter()
        measured = run_step(run, batches)
        seconds.append(time.perf_counter() - started)
        training.append(measured.loss)
        if is_due(iteration, recipe.eval_interval) or iteration == recipe.steps:
            loss = held_out_loss_of(run, recipe)
            held_out.append((iteration, loss))
            if run.ranks.global_rank == 0:
                text = (
                    f"iteration {iteration}: training loss {training[-1]:.4f}, held-out {loss:.4f}"
                )
                print(f"  {text}", file=sys.stderr, flush=True)
    communication = measured.communication  # of all steps: the log interval is the whole run
    coded, steps = communication.coded, communication.steps
    bits = {
        "weight": coded.weights and 8 * coded.weight_bytes / coded.weights,
        "gradient": coded.gradients and 8 * coded.gradient_bytes / coded.gradients,
    }
    batch = run.config.batch
    micro_batches = batch.global_batch_size // (batch.micro_batch_size * run.ranks.num_parts)
    return {
        "parameters": run.trainer.sharding.model.num_parameters(),
        "collectives": [list(row) for row in run.trainer.sharding.describe(micro_batches)],
        "training": training,
        "held_out": held_out,
        "step_seconds": statistics.median(seconds),
        "node_bytes": {"/".join(key): sent / steps for key, sent in communication.sent.items()},
        "bits": {name: number for name, number in bits.items() if number},
    }


def held_out_loss_of(run: Run, recipe: Recipe) -> float:
    """The loss of the recipe's held-out samples."""
    rounds = recipe.eval_samples // (EVAL_MICRO_BATCH * run.ranks.num_parts)
    return held_out_loss(run, EVAL_MICRO_BATCH, rounds)
