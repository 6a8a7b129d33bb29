"""What benchmarks share that train with pretrain_gpt.py's own step."""

import io

from benchmarks.shared.training_setup import CPU
from megatron_zpp.checkpoint.open_model import open_checkpoint
from megatron_zpp.data.loader import Loader
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.metrics import Iteration
from megatron_zpp.parallel.mesh import Ranks, build_mesh
from megatron_zpp.settings.config import Config
from megatron_zpp.train.build import build_run
from megatron_zpp.train.inputs import TRAIN, VALIDATION
from megatron_zpp.train.run import Run
from megatron_zpp.train.stop import Stopping
from zeropp.errors import InputError
from zeropp.ranks.topology import Environment


def cpu_ranks(config: Config) -> Ranks:
    """This process among the ranks of a run of `config`."""
    environment, parallel = Environment.read(), config.parallel
    return Ranks(
        environment=environment,
        device=CPU,
        mesh=build_mesh(CPU, environment.world_size, parallel),
        store=None,
        context_size=parallel.context_parallel_size,
        ranks_per_node=config.zero.zeropp.ranks_per_node,
    )


def silent_run(config: Config, ranks: Ranks) -> Run:
    """Build what pretrain_gpt.py trains with, without output on the console."""
    console = Console(ranks.rank, io.StringIO(), interactive=False)
    return build_run(config, ranks, console, Stopping(config.training), open_checkpoint)


def training_batches(run: Run) -> Loader:
    """The training data, from the first sample on."""
    return run.batches.loader(TRAIN, 0)


def run_step(run: Run, batches: Loader) -> Iteration:
    """Run one training iteration and wait for its numbers; InputError if one is not finite."""
    pending = run.trainer.step(batches)
    iteration, problem = pending.result(), pending.problem()
    if problem is not None:
        raise InputError(f"{problem} at iteration {iteration.iteration}")
    return iteration


def held_out_loss(run: Run, micro_batch_size: int, rounds: int) -> float:
    """Mean loss in nats per token over the first `rounds` batches of the validation split.

    Raises InputError if no token of them has a loss.
    """
    with Loader(
        run.batches.datasets[VALIDATION],
        run.config.data,
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        rank=run.ranks.part,
        world=run.ranks.num_parts,
        eod=run.tokenizer.eod,
    ) as batches:
        losses, num_tokens = run.trainer.evaluate(batches, rounds)
    if not num_tokens:
        raise InputError("no token of the validation split has a loss: measure with other data")
    return losses / num_tokens
