"""What `pretrain_gpt.py` and `megatron-zpp pretrain` run: argv to exit status, each error once."""

import logging
import signal
import time
from collections.abc import Sequence
from contextlib import closing

import torch.distributed as dist

from megatron_zpp.monitor.console import Console
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.parallel.watch import Watch
from megatron_zpp.planner.dry_run import dry_run
from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import CheckpointConfig, Config
from megatron_zpp.text.generate import generate
from megatron_zpp.train.build import build_run
from megatron_zpp.train.loop import TEST, VALIDATION, held_out, train
from megatron_zpp.train.run import Run
from megatron_zpp.train.stop import Interrupted, Stopping
from zeropp import InputError
from zeropp.ranks.topology import Environment

USAGE_ERROR, FAILED = 2, 1
SPEAK_SECONDS = 5.0  # for rank 0 to say what is wrong


def main(
    argv: Sequence[str], program: str = "pretrain_gpt.py", *, needs_pretrained: bool = False
) -> int:
    """Train as the flags in `argv` say; return the exit status.

    `--help` and messages name `program`. With `needs_pretrained` it is an error to leave out
    `--pretrained-checkpoint`.
    """
    with Console() as console:
        try:
            environment = Environment.read()
            console.rank = environment.rank
            config = parse(argv, environment.world_size, program)
            if needs_pretrained and config.lora.pretrained_checkpoint is None:
                raise InputError(
                    f"{program} needs --pretrained-checkpoint FOLDER, the model to fine-tune: a "
                    "folder of checkpoints (tools/convert_hf.py makes one of a Hugging Face "
                    "model); pretrain_gpt.py trains from scratch"
                )
            if config.training.dry_run:
                return dry_run(config, environment, console)
            with Stopping(config.training) as stopping:
                ranks = join_ranks(environment, config.parallel)
                return _watched(config, ranks, console, stopping)
        except InputError as error:
            console.line(f"error: {error}")
            if console.rank:
                time.sleep(SPEAK_SECONDS)  # a launcher ends all ranks when one has ended
            return USAGE_ERROR
        except Interrupted as interruption:
            console.notice(logging.ERROR, str(interruption))
            return interruption.code


def pretrain(config: Config, ranks: Ranks, console: Console, stopping: Stopping) -> None:
    """The whole job: build, train, evaluate, show a sample, say where everything lies."""
    run = build_run(config, ranks, console, stopping)
    resumed_complete = run.counters.iteration >= run.schedules.length.iterations
    if resumed_complete:
        console.line(f"training is complete: {run.counters.iteration} iterations are done")
    sample = None
    with closing(run.metrics):
        finished = config.training.skip_train or resumed_complete or train(run)
        if finished:
            held_out(run, VALIDATION, "the end of training for val data")
            held_out(run, TEST, "the end of training for test data")
            if config.evaluation.sample_prompt is not None:
                sample = sample_text(run)
    title = "Finished" if finished else f"Stopped; {how_to_go_on(config.checkpoint)}"
    rows = [*run.account.rows(), *places(config)]
    console.ending(run.metrics.history, rows, sample, title)


def sample_text(run: Run) -> str:
    """The prompt and what the model makes of it; every rank takes part."""
    evaluation = run.config.evaluation
    text = generate(
        run.sharding.model,
        run.tokenizer,
        evaluation.sample_prompt,
        max_new_tokens=evaluation.sample_length,
        temperature=0.8,
        top_k=40,
        seed=run.config.training.seed,
    )
    run.sharding.release()
    return evaluation.sample_prompt + text


def how_to_go_on(checkpoint: CheckpointConfig) -> str:
    """What to type after a stop in the middle."""
    if checkpoint.save is None:
        return "nothing was saved (--save FOLDER would)"
    if checkpoint.load == checkpoint.save:
        return "the same command goes on"
    return f"--load {checkpoint.save} goes on"


def places(config: Config) -> list[tuple[str, str]]:
    """Where TensorBoard's files and the checkpoints lie."""
    rows = [("TensorBoard", config.log.tensorboard_dir), ("checkpoints", config.checkpoint.save)]
    return [(name, place) for name, place in rows if place]


def _watched(config: Config, ranks: Ranks, console: Console, stopping: Stopping) -> int:
    """Run `pretrain` with an eye on the other ranks, and leave them in peace."""
    watch = Watch(ranks.store, ranks.rank, ranks.num_ranks) if ranks.num_ranks > 1 else None
    status = _guarded(config, ranks, console, stopping, watch)
    if watch:
        watch.close()
    if status == 0 or watch is None:  # with a dead peer this could wait for it
        dist.destroy_process_group()
    return status


def _guarded(
    config: Config, ranks: Ranks, console: Console, stopping: Stopping, watch: Watch | None
) -> int:
    """Run `pretrain`; of several ranks that fail together, the first one says why."""
    try:
        pretrain(config, ranks, console, stopping)
        return 0
    except InputError as error:
        stopping.hold()
        if watch is None or watch.blame_self(str(error)):
            console.notice(logging.ERROR, str(error))
        return FAILED
    except Interrupted as interruption:
        # A launcher sends SIGTERM when another rank has died, too.
        asks = watch is not None and interruption.number == signal.SIGTERM
        culprit = watch.find_culprit() if asks else None
        console.notice(logging.ERROR, culprit or str(interruption))
        return interruption.code
    except Exception as error:
        stopping.hold()
        culprit = watch.find_culprit() if watch else None
        if culprit is None:
            if watch:
                watch.blame_self(f"{type(error).__name__}: {error}")
            raise
        console.notice(logging.ERROR, f"{culprit}; this rank ends too")
        return FAILED
