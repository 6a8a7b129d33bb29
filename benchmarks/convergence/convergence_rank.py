"""One run of a variant: what its ranks do, and the orders that they are given."""

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from benchmarks.convergence.variants import EVAL_MICRO_BATCH, SPIKE, SPIKE_FACTOR, Recipe
from benchmarks.shared.pretrain_run import held_out_loss, run_step, silent_run, training_batches
from benchmarks.shared.rank_processes import RankProcesses
from megatron_zpp.parallel.mesh import join_ranks
from megatron_zpp.parallel.replicas import joining_of
from megatron_zpp.train.run import Run
from zeropp.ranks.topology import Environment


class VariantRank:
    """The orders of a rank that trains a variant."""

    def build(self, variant: str, seed: int, recipe: Recipe) -> dict:
        """Join the ranks, and build what they train."""
        run = build_variant(variant, seed, recipe)
        self.recipe, self.run, self.batches = recipe, run, training_batches(run)
        batch, sharding = run.config.batch, run.trainer.sharding
        micro_batches = batch.global_batch_size // (batch.micro_batch_size * run.ranks.num_parts)
        return {
            "parameters": sharding.model.num_parameters(),
            "collectives": [list(row) for row in sharding.describe(micro_batches)],
        }

    def train(self, steps: int) -> dict:
        """Train for some steps; returns the loss and the seconds of each.

        After the last step of the run also `node_bytes`, those that a node sends per step, by
        "purpose/hop" and without evaluations, and `bits` of a weight and of a gradient in coded
        messages between nodes, if any is coded.
        """
        training, seconds = [], []
        for _ in range(steps):
            started = time.perf_counter()
            measured = run_step(self.run, self.batches)
            seconds.append(time.perf_counter() - started)
            training.append(measured.loss)
        answer = {"training": training, "seconds": seconds}
        if (sent := measured.communication) is None:  # the log interval is the whole run
            return answer
        bits = {
            "weight": sent.coded.weights and 8 * sent.coded.weight_bytes / sent.coded.weights,
            "gradient": sent.coded.gradients
            and 8 * sent.coded.gradient_bytes / sent.coded.gradients,
        }
        return answer | {
            "node_bytes": {"/".join(key): count / sent.steps for key, count in sent.sent.items()},
            "bits": {name: number for name, number in bits.items() if number},
        }

    def held_out(self) -> float:
        """The loss of the recipe's held-out samples."""
        rounds = self.recipe.eval_samples // (EVAL_MICRO_BATCH * self.run.ranks.num_parts)
        return held_out_loss(self.run, EVAL_MICRO_BATCH, rounds)


def train_variant(
    ranks: RankProcesses,
    variant: str,
    seed: int,
    recipe: Recipe,
    during_steps: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[dict, list[float]]:
    """Train a variant; held-out losses are taken at intervals, outside of `during_steps`.

    Returns what rank 0 says of the run, and the seconds of all steps of the slowest rank before
    each of the held-out losses.
    """
    result = ranks.ask("build", variant, seed, recipe)[0]
    training, held_out = [], [(0, ranks.ask("held_out")[0])]
    seconds, elapsed = [], [0.0]
    for first in range(0, recipe.steps, recipe.eval_interval):
        last = min(first + recipe.eval_interval, recipe.steps)
        with during_steps():
            answers = ranks.ask("train", last - first)
        elapsed.append(elapsed[-1] + max(sum(answer["seconds"]) for answer in answers))
        training += answers[0].pop("training")
        seconds += answers[0].pop("seconds")
        held_out.append((last, ranks.ask("held_out")[0]))
        losses = f"training loss {training[-1]:.4f}, held-out {held_out[-1][1]:.4f}"
        print(f"  iteration {last}: {losses}", file=sys.stderr, flush=True)
    result |= {"training": training, "held_out": held_out}
    return result | {"step_seconds": statistics.median(seconds), **answers[0]}, elapsed


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
        """The learning rate of the step after `scheduled_samples`."""
        factor = SPIKE_FACTOR if scheduled_samples in self.samples else 1.0
        return factor * self.rate(scheduled_samples)
