"""The ranks of this machine, run once: new Python programs, or forks of this process.

The variables that describe a rank to its program are torchrun's.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeropp.ranks.launcher import rank_main
from zeropp.ranks.launcher.failed_rank import END_SECONDS, EndedRank, report_failure
from zeropp.ranks.launcher.forked_rank import run_forked
from zeropp.ranks.launcher.meeting_point import MeetingPoint
from zeropp.ranks.launcher.signals import Signals, StoppedBySignal
from zeropp.ranks.topology import environment_with

SAVE_SECONDS = 300  # between SIGINT or SIGTERM and SIGKILL, for the ranks to save
LOCALHOST = "127.0.0.1"
THREADS = Path("/proc/self/task")  # of this process, on Linux


class RankProcess(NamedTuple):
    """A rank's process, which leads a session; `poll` returns its exit code once it has ended."""

    pid: int
    poll: Callable[[], int | None]


class World(NamedTuple):
    """Where all ranks meet, how many they are, and which of them are of this machine."""

    host: str
    port: int
    size: int
    first_rank: int = 0
    node: int = 0
    num_nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """`program` on each of `num_ranks` ranks of this machine.

    program: a script, or `--module` and a module, with its arguments. num_cores: to which a rank is
    pinned; 0: to none. ranks_per_node: None for all. imports: modules that ranks share; if there
    are any, ranks on CPUs are forked. tells_rank: the program gets `--local_rank=N` before its
    arguments. meeting: where other machines' launchers are met; None: there are none.
    """

    program: list[str]
    num_ranks: int
    num_cores: int = 0
    ranks_per_node: int | None = None
    imports: tuple[str, ...] = ()
    tells_rank: bool = False
    meeting: MeetingPoint | None = None

    def run(self) -> int:
        """Return 0 when all ranks have ended, or the exit code of the one that failed first.

        The others of a rank that fails are ended, as are all by SIGINT and SIGTERM, with time to
        save. Raises StoppedBySignal then, and NetworkError if other machines are not met.
        """
        if self.meeting is not None:
            with self.meeting.held() as store:
                return self._run(self._meet(self.meeting, store), None)
        with socket.create_server((LOCALHOST, 0), backlog=socket.SOMAXCONN) as listener:
            return self._run(World(*listener.getsockname(), size=self.num_ranks), listener)

    def _meet(self, meeting: MeetingPoint, store: dist.Store) -> World:
        """Return the world, once all launchers have said how many ranks they run."""
        store.set(f"launcher/{meeting.node}", str(self.num_ranks))
        counts = [int(store.get(f"launcher/{node}")) for node in range(meeting.num_nodes)]
        return World(
            host=meeting.address,
            port=meeting.port,
            size=sum(counts),
            first_rank=sum(counts[: meeting.node]),
            node=meeting.node,
            num_nodes=meeting.num_nodes,
        )

    def _run(self, world: World, listener: socket.socket | None) -> int:
        """Run the ranks; `listener` is where they meet, unless another machine keeps the store."""
        start = self._start_program
        if listener is not None and self.imports and _can_fork_with(self.imports):
            start = partial(self._fork, listener)
        with Signals() as signals:
            processes: list[RankProcess] = []
            try:
                for local_rank in range(self.num_ranks):
                    processes.append(start(local_rank, self._variables(world, local_rank)))
                store = None if listener is None else _open_store(listener)  # it has a thread
                ended, stopped_by = _watch(processes, signals)
                del store
            finally:
                _send(signal.SIGKILL, [each for each in processes if each.poll() is None])
        if stopped_by is not None:
            raise StoppedBySignal(stopped_by)
        failed = {world.first_rank + rank: each for rank, each in ended.items() if each.code}
        return report_failure(failed) if failed else 0

    def _variables(self, world: World, local_rank: int) -> dict[str, str]:
        values = {
            "RANK": world.first_rank + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world.size,
            "LOCAL_WORLD_SIZE": self.ranks_per_node or self.num_ranks,
            "GROUP_RANK": world.node,
            "GROUP_WORLD_SIZE": world.num_nodes,
            "MASTER_ADDR": world.host,
            "MASTER_PORT": world.port,
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex if self.meeting is None else "zeropp",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        return {name: str(value) for name, value in values.items()}

    def _arguments(self, local_rank: int) -> list[str]:
        """Return those of `rank_main`."""
        begin = 2 if self.program[0] == "--module" else 1
        told = [f"--local_rank={local_rank}"] if self.tells_rank else []
        program = [*self.program[:begin], *told, *self.program[begin:]]
        return [*map(str, (os.getpid(), self.num_cores, local_rank)), *program]

    def _start_program(self, local_rank: int, variables: dict[str, str]) -> RankProcess:
        command = [sys.executable, rank_main.__file__, *self._arguments(local_rank)]
        process = subprocess.Popen(command, env=environment_with(variables), start_new_session=True)
        return RankProcess(process.pid, process.poll)

    def _fork(
        self, listener: socket.socket, local_rank: int, variables: dict[str, str]
    ) -> RankProcess:
        arguments = self._arguments(local_rank), variables, listener
        process = get_context("fork").Process(target=run_forked, args=arguments)
        process.start()
        return RankProcess(process.pid, lambda: process.exitcode)


def _can_fork_with(imports: Iterable[str]) -> bool:
    """Import modules, and return whether forks of this process can then be ranks.

    They cannot on GPUs, and not where imports start threads, which forks do not have.
    """
    if not THREADS.is_dir() or torch.cuda.device_count():
        return False
    with suppress(ImportError):  # which the ranks report
        for module in imports:
            import_module(module)
        gc.collect()
        gc.freeze()  # forks that collect garbage would copy all that they share
        return len(list(THREADS.iterdir())) == 1
    return False


def _open_store(listener: socket.socket) -> dist.Store:
    """Open the store in which ranks meet, at a port that listens already."""
    host, port = listener.getsockname()
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host, port, None, True, **options)


def _watch(
    processes: Sequence[RankProcess], signals: Signals
) -> tuple[dict[int, EndedRank], signal.Signals | None]:
    """Return how each has ended, and by which signal to this process, if that ended them."""
    ended: dict[int, EndedRank] = {}
    stopped_by, deadline = None, None
    while True:
        for rank, process in enumerate(processes):
            if rank not in ended and (code := process.poll()) is not None:
                ended[rank] = EndedRank(code, time.monotonic())
        running = [each for rank, each in enumerate(processes) if rank not in ended]
        if not running:
            return ended, stopped_by
        if deadline is None and any(each.code for each in ended.values()):
            _send(signal.SIGTERM, running)
            deadline = time.monotonic() + END_SECONDS
        rest = None if deadline is None else deadline - time.monotonic()
        if rest is not None and rest <= 0:
            _send(signal.SIGKILL, running)
            rest = None
        for number in signals.wait(rest):
            if number != signal.SIGCHLD:
                stopped_by = stopped_by or signal.Signals(number)
                _send(number, running)
                deadline = deadline or time.monotonic() + SAVE_SECONDS


def _send(number: int, processes: Iterable[RankProcess]) -> None:
    """Send a signal to processes and to those that they have started."""
    for process in processes:
        with suppress(ProcessLookupError):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:  # a fork that does not lead a session yet
                os.kill(process.pid, number)
