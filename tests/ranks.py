"""Run a plain test function on N gloo ranks of this machine: `@ranks(4)` above a pytest function.

The ranks are processes that live as long as the pytest session and are used again by every test:
a test costs a new process group, not new processes. The function sees its own rank through
`torch.distributed`, its fixtures and parameters arrive pickled, and `RANK`, `WORLD_SIZE`,
`LOCAL_RANK` and `LOCAL_WORLD_SIZE` are set. The first rank that fails is the one that is shown.
"""

import atexit
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

START_SECONDS = 180  # for importing torch, where it is not forked
GRACE_SECONDS = 4  # for the other ranks, after one has failed
STACK_SECONDS = 0.5  # for a hung rank to write down where it is
OUTPUT_CHARACTERS = 6000
ROOT = Path(__file__).resolve().parent.parent
SERVE = "import sys; from tests.rank_worker import serve; serve(int(sys.argv[1]))"


def ranks(count: int, *, timeout: float = 60, ranks_per_node: int | None = None) -> Callable:
    """Make a test function run on `count` ranks, for at most `timeout` seconds.

    The variable RANKS_MAY_TAKE multiplies the time, where workers share a GPU. `ranks_per_node`
    sets `LOCAL_WORLD_SIZE` (default: all on one node). Failure, skip and xfail of a rank become
    those of the test; the ranks that hang are killed and named.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def on_ranks(**kwargs: object) -> None:
            __tracebackhide__ = True
            job = _job(function, kwargs, ranks_per_node or count)
            factor = float(os.environ.get("RANKS_MAY_TAKE", "1"))
            run = shared_pool().run(job, count, factor * timeout)
            run.report()

        return on_ranks

    return decorate


@functools.cache
def shared_pool() -> "Pool":
    """Return this session's rank processes; none is started before the first test needs it."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a test, and the file through which they meet; an equal one is joined once.

    It knows no test's timeout, so that tests with different ones use the same group: who waits
    for too long is killed.
    """

    store: str
    size: int


@dataclass(frozen=True)
class Progress:
    """How much a rank did in the default group: only ranks that did the same can go on in it."""

    groups: int
    collectives: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """A test function (by file and name), its pickled arguments and how large a node is."""

    path: str
    module: str
    name: str
    arguments: bytes
    ranks_per_node: int


@dataclass(frozen=True)
class Outcome:
    """`kind` is passed, failed, skipped or xfailed; `time` tells which rank was first."""

    kind: str
    text: str
    time: float


@dataclass(frozen=True)
class Idle:
    """A rank that has cleaned up after a test, and how far it is in the default group if any."""

    progress: Progress | None


@dataclass
class Run:
    """What became of one job: an outcome of each rank that had one, and the ranks that had none."""

    count: int
    timeout: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    died: dict[int, str] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    outputs: dict[int, str] = field(default_factory=dict)
    progress: dict[int, Progress | None] = field(default_factory=dict)

    def can_go_on(self) -> bool:
        """Return whether all ranks have come equally far in a group that the next test can use."""
        progress = set(self.progress.values())
        passed = len(self.progress) == self.count and not self.failed()
        return passed and len(progress) == 1 and None not in progress

    def failed(self) -> bool:
        return bool(self.died) or any(o.kind == "failed" for o in self.outcomes.values())

    def report(self) -> None:
        """Raise pytest's failure, skip or xfail; return if every rank passed."""
        __tracebackhide__ = True
        if self.failed() or self.hung:
            pytest.fail(self._story(), pytrace=False)
        for outcome in self.outcomes.values():
            if outcome.kind == "skipped":
                pytest.skip(outcome.text)
            if outcome.kind == "xfailed":
                pytest.xfail(outcome.text)

    def _story(self) -> str:
        failures = {r: o for r, o in self.outcomes.items() if o.kind == "failed"}
        first = min(failures, key=lambda rank: failures[rank].time, default=None)
        parts = [f"rank {r} of {self.count} died: {how}" for r, how in sorted(self.died.items())]
        if first is not None:
            parts.append(f"rank {first} of {self.count} failed first:\n{failures[first].text}")
        others = sorted(set(failures) - {first})
        if others:
            parts.append(f"failed later: rank {_listed(others)}")
        if self.hung:
            after = "after that" if self.failed() else f"after {self.timeout:g} s"
            parts.append(f"still running {after} and killed: rank {_listed(self.hung)}")
        for rank in sorted({0, *self.died, *self.hung, *([] if first is None else [first])}):
            if self.outputs.get(rank):
                parts.append(f"---- output of rank {rank} ----\n{self.outputs[rank]}")
        return "\n".join(parts)


@dataclass
class Worker:
    """One rank process and the parent's end of the pipe to it."""

    process: subprocess.Popen
    connection: Connection

    def kill(self) -> None:
        """End the process and whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """The rank processes, by rank; dead ones are replaced when the next test needs them."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.world: World | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="worlds-", ignore_cleanup_errors=True)
        self.number = itertools.count()

    def run(self, job: Job, count: int, timeout: float) -> Run:
        """Run the job on the first `count` ranks and wait for them all."""
        self._start_missing(count)
        world = self._world(count)
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
            for rank in range(count):
                message = pickle.dumps((rank, folder, world, job))
                self.workers[rank].connection.send_bytes(message)
            run = Run(count, timeout)
            try:
                self._collect(run)
            finally:
                self._kill_busy(run)
                self.world = world if run.can_go_on() else None
            for rank in range(count):
                run.outputs[rank] = _tail(Path(folder) / f"output.{rank}")
        return run

    def close(self) -> None:
        """End all rank processes."""
        for worker in self.workers.values():
            worker.kill()
        self.workers.clear()
        self.folder.cleanup()

    def _start_missing(self, count: int) -> None:
        fresh = []
        for rank in range(count):
            if rank in self.workers and self.workers[rank].process.poll() is None:
                continue
            self.workers[rank] = _start_worker()
            fresh.append(rank)
        if fresh:
            self.world = None
        for rank in fresh:
            if not self.workers[rank].connection.poll(START_SECONDS):
                raise TimeoutError(f"rank {rank} did not start in {START_SECONDS} s")
            self.workers[rank].connection.recv()

    def _world(self, count: int) -> World:
        """Return the world of the last test if it will do, else a new one."""
        store = str(Path(self.folder.name) / str(next(self.number)))
        world = World(store=store, size=count)
        if self.world is not None and replace(world, store=self.world.store) == self.world:
            return self.world
        return world

    def _collect(self, run: Run) -> None:
        """Wait until every rank is idle again, or dead, or its time is over."""
        deadline = time.monotonic() + run.timeout
        busy = {self.workers[rank].connection: rank for rank in range(run.count)}
        run.hung = list(busy.values())
        while busy and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(busy), left):
                self._receive(run, busy[connection])
                if busy[connection] not in run.hung:
                    del busy[connection]
            if run.failed():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

    def _receive(self, run: Run, rank: int) -> None:
        """Take one message: an outcome, then Idle once the rank is idle, or the end of the pipe."""
        worker = self.workers[rank]
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            run.died[rank] = _how(worker.process.wait())
            run.hung.remove(rank)
            self.workers.pop(rank).kill()
            return
        if isinstance(message, Idle):
            run.hung.remove(rank)
            run.progress[rank] = message.progress
        else:
            run.outcomes[rank] = message

    def _kill_busy(self, run: Run) -> None:
        for rank in run.hung:
            os.kill(self.workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS if run.hung else 0)
        for rank in run.hung:
            self.workers.pop(rank).kill()


def _start_worker() -> Worker:
    ours, theirs = Pipe()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(theirs.fileno())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TORCH_GLOO_LAZY_INIT": "1"},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return Worker(process, ours)


def _job(function: Callable, kwargs: dict, ranks_per_node: int) -> Job:
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is not at the top of its file: a rank needs that")
    for name, value in kwargs.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"argument {name!r} cannot be sent to the ranks: {error}") from error
    return Job(
        path=function.__code__.co_filename,
        module=function.__module__,
        name=function.__name__,
        arguments=pickle.dumps(kwargs),
        ranks_per_node=ranks_per_node,
    )


def _how(exitcode: int) -> str:
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_text(errors="replace").rstrip()
    return text if len(text) <= OUTPUT_CHARACTERS else "[...]" + text[-OUTPUT_CHARACTERS:]
