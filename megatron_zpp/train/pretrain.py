"""The program behind `megatron-zpp pretrain` and its like; each error is printed once."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_zpp.checkpoint.iteration_folders import checkpoint_folder
from megatron_zpp.checkpoint.open_model import OpenModel
from megatron_zpp.monitor.console import Console
from megatron_zpp.monitor.report.report import report_after_failure, report_rows
from megatron_zpp.parallel.heartbeat import Heartbeat
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.parallel.replicas import joining_of
from megatron_zpp.settings.arguments import parse, require_pretrained
from megatron_zpp.settings.config import CheckpointConfig, Config, LogConfig
from megatron_zpp.text.generate import generate
from megatron_zpp.train.build import build_run
from megatron_zpp.train.inputs import TEST, TRAIN, VALIDATION
from megatron_zpp.train.loop import evaluate_split, train
from megatron_zpp.train.resume import with_own_folders
from megatron_zpp.train.run import Run
from megatron_zpp.train.stop import Interrupted, Stopping
from zeropp import InputError, __version__
from zeropp.checkpoint import hold_folder
from zeropp.errors import NetworkError
from zeropp.native import PACKAGE, source_hash
from zeropp.ranks import (
    OTHER_RANK_FAILED,
    Environment,
    WaitError,
    refuse_to_start,
    report_on_each_machine,
    report_once,
    use_deterministic_cublas,
)

USAGE_ERROR, FAILED = 2, 1
PACKAGES = (Path(__file__).resolve().parents[1], PACKAGE)
DIGITS = 8  # of a hash, to show


def main(
    argv: Sequence[str],
    program: str,
    load_planner: Callable[[str, str], ModuleType],
    open_model: OpenModel,
    *,
    needs_pretrained: bool = False,
) -> int:
    """Pretrain a GPT with the flags in `argv`; return the exit status.

    `program` is the name in `--help` and in messages. `load_planner` returns a module of the
    planner for a flag that needs it. `open_model` opens `--pretrained-checkpoint`, which
    `needs_pretrained` makes a required flag.
    """
    with Console() as console:
        environment = Environment()
        try:
            environment = Environment.read()
            console.rank = environment.rank
            config = parse(argv, environment.world_size, program)
            console.set_level(config.log.logging_level)
            if needs_pretrained:
                require_pretrained(config.pretrained_checkpoint, program)
            if config.training.dry_run:
                planner = load_planner("--dry-run", "dry_run")
                return planner.dry_run(config, environment, console, open_model)
            place = environment
            if num_ranks := config.training.rehearse_ranks:
                place = environment.planned(num_ranks, config.zero.zeropp.ranks_per_node)
            with (
                Stopping(config.training) as stopping,
                deterministic_kernels() if config.training.deterministic_mode else nullcontext(),
            ):
                per_node = config.zero.zeropp.ranks_per_node
                settings = {**versions(), **config.shared()}
                sections = config.zero, config.checkpoint, config.parallel
                joining = joining_of(*sections, place, settings)
                ranks = join_ranks(place, config.parallel, per_node, settings, joining)
                program = RankProgram(
                    config=replace(config, checkpoint=with_own_folders(config.checkpoint, ranks)),
                    ranks=ranks,
                    console=console,
                    stopping=stopping,
                    open_model=open_model,
                )
                if num_ranks:
                    return program.rehearse(load_planner("--rehearse-ranks", "rehearsal"))
                return program.run()
        except NetworkError as error:
            message = str(error)
            report_on_each_machine(environment, lambda: console.notice(logging.ERROR, message))
            return FAILED
        except InputError as error:
            message = str(error)
            if report_once(environment, lambda: console.notice(logging.ERROR, message)):
                refuse_to_start(environment, message)
            return USAGE_ERROR
        except Interrupted as interruption:
            console.notice(logging.ERROR, str(interruption))
            return interruption.code


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """`--deterministic-mode`: kernels that give the same digits every time they run.

    PyTorch raises RuntimeError for an operation without one. It has to be entered before the first
    product of matrices on a GPU.
    """
    before = torch.are_deterministic_algorithms_enabled()
    use_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def versions() -> dict[str, str]:
    """Return the versions that all ranks must have alike, by the names that users know."""
    sources = " ".join(source_hash(folder)[:DIGITS] for folder in PACKAGES)
    return {"version": f"{__version__}, its sources {sources}", "PyTorch": torch.__version__}


@dataclass(kw_only=True)
class RankProgram:
    """What one rank does once it has met the others, and what a failure means for all of them.

    `heartbeat` notices failures of other ranks; a single rank has none.
    """

    config: Config
    ranks: Ranks
    console: Console
    stopping: Stopping
    open_model: OpenModel
    heartbeat: Heartbeat | None = None

    def run(self) -> int:
        """Run `pretrain` while the ranks detect each other's failures; return the exit status."""
        ranks = self.ranks
        if ranks.num_ranks > 1:
            limit = 60 * self.config.parallel.distributed_timeout_minutes
            self.heartbeat = Heartbeat(
                ranks.store, ranks.rank, ranks.num_ranks, ranks.main_thread, limit
            )
        status = self._report()
        ranks.replicas.close(succeeded=status == 0)
        if self.heartbeat:
            keeps_store = ranks.rank == 0 and not ranks.environment.launcher_has_store
            self.heartbeat.close(keeps_store=keeps_store)
        if status and ranks.global_rank == 0:
            for name, value in report_after_failure(self.config.log):
                self.console.line(f"{name} so far: {value}")
        if status == 0 or self.heartbeat is None:  # else it could wait for a rank that has died
            dist.destroy_process_group()
        return status

    def pretrain(self) -> None:
        """Build the run, train, evaluate, generate a sample and print a summary."""
        config, is_first = self.config, self.ranks.environment.local_rank == 0
        save = None if config.training.skip_train else config.checkpoint.save
        alone = hold_folder(Path(save), "--save", is_first_on_machine=is_first) if save else None
        with alone or nullcontext() as save_lock:  # no other job saves there
            train_and_evaluate(
                build_run(
                    config, self.ranks, self.console, self.stopping, self.open_model, save_lock
                )
            )

    def rehearse(self, rehearsal: ModuleType) -> int:
        """Print what a few steps take beside what is foretold; return the exit status."""
        self.console.table("Rehearsal", rehearsal.rows(self._steps(), self.ranks.device))
        dist.destroy_process_group()
        return 0

    def _steps(self) -> Iterator[Run]:
        """Take all steps of a run, and nothing else; yield it after each."""
        run = build_run(self.config, self.ranks, self.console, self.stopping, self.open_model)
        with run.batches.loader(TRAIN, 0) as batches:
            for _ in range(run.trainer.schedules.length.iterations):
                run.trainer.step(batches)
                yield run

    def _report(self) -> int:
        """Run `pretrain` and report its failure, on several ranks only the first one's."""
        console, stopping, heartbeat = self.console, self.stopping, self.heartbeat
        try:
            self.pretrain()
            return 0
        except Interrupted as interruption:
            return self._report_interruption(interruption)
        except Exception as error:
            if stopping.interruption:  # which torch's checkpoint code caught, and then failed
                return self._report_interruption(stopping.interruption)
            stopping.ignore_signals()
            if isinstance(error, InputError):
                is_first = heartbeat is None or heartbeat.publish_own_failure(str(error))
                environment = self.ranks.environment  # all raise it alike: each machine says it
                if is_first or (environment.machines > 1 and environment.local_rank == 0):
                    console.notice(logging.ERROR, str(error))
                return FAILED
            failure = heartbeat.find_failure() if heartbeat else None
            if failure is None:
                if heartbeat:
                    heartbeat.publish_own_failure(f"{type(error).__name__}: {error}")
                if isinstance(error, WaitError):
                    console.notice(logging.ERROR, str(error))
                    return FAILED
                raise
            if heartbeat.is_of_this_rank(failure):
                console.notice(logging.ERROR, failure)
                return FAILED
            console.notice(logging.ERROR, f"{failure}; this rank ends too")
            return OTHER_RANK_FAILED

    def _report_interruption(self, interruption: Interrupted) -> int:
        """Say that a signal ends this rank, or which failure it follows from; return the status."""
        failure, heartbeat = None, self.heartbeat
        if heartbeat and interruption.number == signal.SIGTERM:
            failure = heartbeat.find_failure()  # a launcher sends it when another rank has died
        if heartbeat and failure is None:  # ranks of other machines may have got no signal
            heartbeat.publish_own_failure(str(interruption))
        self.console.notice(logging.ERROR, failure or str(interruption))
        if failure is None:
            self.console.line(last_checkpoint(self.config.checkpoint))
        return interruption.code


def train_and_evaluate(run: Run) -> None:
    """Train, evaluate, generate a sample and print a summary."""
    config, console, trainer = run.config, run.console, run.trainer
    resumed_complete = trainer.counters.iteration >= trainer.schedules.length.iterations
    if resumed_complete:
        console.line(f"training is complete: {trainer.counters.iteration} iterations are done")
    sample = None
    with closing(run.metrics), run.writer or nullcontext():
        finished = config.training.skip_train or resumed_complete or train(run)
        if finished:
            evaluate_split(run, VALIDATION, "the end of training for val data")
            evaluate_split(run, TEST, "the end of training for test data")
            if config.evaluation.sample_prompt is not None:
                sample = sample_text(run)
                run.metrics.sample(sample)
    title = "Finished" if finished else f"Stopped; {how_to_resume(config.checkpoint)}"
    rows = [*trainer.communication.summary_rows(), *output_folders(config.log, config.checkpoint)]
    if run.ranks.global_rank == 0:
        rows += report_rows(config.log)
    console.ending(run.metrics.history, rows, sample, title)


def sample_text(run: Run) -> str:
    """Return the sample prompt with the model's continuation; all ranks call it."""
    evaluation = run.config.evaluation
    text = generate(
        run.trainer.sharding.model,
        run.tokenizer,
        evaluation.sample_prompt,
        max_new_tokens=evaluation.sample_length,
        temperature=0.8,
        top_k=40,
        seed=run.config.training.seed,
    )
    run.trainer.sharding.release()
    return evaluation.sample_prompt + text


def how_to_resume(checkpoint: CheckpointConfig) -> str:
    """How to continue a run that stopped early."""
    if checkpoint.save is None:
        return "nothing was saved: --save FOLDER saves checkpoints"
    if checkpoint.load == checkpoint.save:
        return "run the same command again to continue"
    return f"continue with --load {checkpoint.save}"


def last_checkpoint(checkpoint: CheckpointConfig) -> str:
    """What remains of a run that a signal ended at once, and how to continue it."""
    if checkpoint.save is None:
        return how_to_resume(checkpoint)
    latest = checkpoint_folder(Path(checkpoint.save)).latest()
    if latest is None:
        return (
            f"there is no checkpoint in {checkpoint.save} yet: --save-interval N saves one every N "
            "iterations, and --exit-signal-handler one at a signal"
        )
    what = f"the last checkpoint in {checkpoint.save} is of iteration {latest}"
    return f"{what}; {how_to_resume(checkpoint)}"


def output_folders(log: LogConfig, checkpoint: CheckpointConfig) -> list[tuple[str, str]]:
    """Where the TensorBoard logs and the checkpoints are."""
    rows = [("TensorBoard", log.tensorboard_dir), ("checkpoints", checkpoint.save)]
    return [(name, folder) for name, folder in rows if folder]
