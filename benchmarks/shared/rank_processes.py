"""Ranks as processes that wait for orders: each order goes to all ranks, and each rank answers.

Orders and answers travel through pipes, not through a network that may be measured. The ranks begin
an order within microseconds of each other, so it needs no barrier. Run as a program, the module is
a rank.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import MappingProxyType

import torch.distributed as dist

from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.processes import start
from zeropp.errors import InputError
from zeropp.ranks.exit import exit_process
from zeropp.ranks.topology import usable_cores

ORDER_SECONDS = 600  # for every rank of a cluster to answer
ON_RANK = "on_rank"  # a benchmark's function that `run_on_ranks` calls
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NONE: Mapping[str, str] = MappingProxyType({})
NO_GPUS: Mapping[str, str] = MappingProxyType({"CUDA_VISIBLE_DEVICES": ""})
Target = str | type  # orders are functions of a module, or methods of an object that a rank makes


class RankFailed(RuntimeError):
    """A rank died or did not answer; what it said of that is on standard error."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One rank's process, and the pipe to it."""

    rank: int
    popen: subprocess.Popen
    connection: Connection

    @classmethod
    def start(
        cls, target: Target, rank: int, variables: Mapping[str, object], prefix: Sequence[str] = ()
    ) -> "RankProcess":
        """Start a rank, by a command that may have a prefix."""
        ours, theirs = Pipe()
        program = (sys.executable, "-m", "benchmarks.shared.rank_processes")
        name = target if isinstance(target, str) else f"{target.__module__}:{target.__name__}"
        command = [*prefix, *program, str(theirs.fileno()), name]
        settings = {name: str(value) for name, value in variables.items()} | {"RANK": str(rank)}
        popen = start(command, None, variables=settings, pass_fds=[theirs.fileno()])
        theirs.close()
        return cls(rank=rank, popen=popen, connection=ours)

    def kill(self) -> None:
        """End the process and what it has started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def died(self) -> RankFailed:
        """The error that says how."""
        code = self.popen.wait()
        state = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return RankFailed(f"rank {self.rank} died: {state}")


@dataclass(frozen=True)
class RankProcesses:
    """All ranks; `ask` gives them an order, to be answered in `seconds` unless that is None."""

    processes: Sequence[RankProcess]
    seconds: float | None = None

    def ask(self, order: str, *arguments: object, **named: object) -> list:
        """Give every rank the same order; returns their answers in the order of ranks.

        Raises RankFailed for the first rank that dies, or if some do not answer in time; the
        InputError or Disagreement that a rank raises.
        """
        for process in self.processes:
            try:
                process.connection.send((order, arguments, named))
            except (BrokenPipeError, ConnectionResetError):
                raise process.died() from None
        answers: dict[int, object] = {}
        waiting = {process.connection: process for process in self.processes}
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        while waiting:
            ready = wait(list(waiting), deadline and deadline - time.monotonic())
            if not ready:
                late = next(iter(waiting.values()))
                why = f"has not answered to {order!r} in {self.seconds:g} s"
                raise RankFailed(f"rank {late.rank} {why}")
            for connection in ready:
                process = waiting.pop(connection)
                try:
                    answers[process.rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise process.died() from None
                if isinstance(answers[process.rank], Exception):
                    raise answers[process.rank]
        return [answers[process.rank] for process in self.processes]

    def pid_of_each_node(self, ranks_per_node: int) -> list[int]:
        """The process id of each node's first rank."""
        return [process.popen.pid for process in self.processes[::ranks_per_node]]


@contextlib.contextmanager
def started_ranks(
    target: Target,
    num_ranks: int,
    ranks_per_node: int | None = None,
    variables: Mapping[str, str] = NONE,
    seconds: float | None = None,
) -> Iterator[RankProcesses]:
    """Start ranks on this machine, whose cores they divide, and kill them at the end.

    ranks_per_node: of what they take for a node (default: all).
    """
    with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as listener:
        host, port = listener.getsockname()
        descriptor = listener.detach()
    options = {"wait_for_workers": False, "master_listen_fd": descriptor}
    store = dist.TCPStore(host, port, None, True, **options)
    threads = str(max(1, len(usable_cores()) // num_ranks))
    common = {
        "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": ranks_per_node or num_ranks,
        "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": host, "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads), **variables,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(num_ranks):
            processes.append(RankProcess.start(target, rank, common | {"LOCAL_RANK": rank}))
            stack.callback(processes[-1].kill)
        yield RankProcesses(processes, seconds)
    del store


def run_on_ranks(
    module: str,
    num_ranks: int,
    *arguments: object,
    ranks_per_node: int | None = None,
    variables: Mapping[str, str] = NONE,
) -> object:
    """Call `on_rank` of a module on ranks of this machine; return rank 0's answer.

    `variables` are added to the environment. Raises what `RankProcesses.ask` does.
    """
    with started_ranks(module, num_ranks, ranks_per_node, variables) as ranks:
        return ranks.ask(ON_RANK, *arguments)[0]


def main() -> None:
    """Answer orders until the other end of the pipe is closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    module, _, kind = sys.argv[2].partition(":")
    target = import_module(module)
    target = getattr(target, kind)() if kind else target
    while True:
        try:
            order, arguments, named = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(target, order)(*arguments, **named)
        except (Disagreement, InputError) as problem:
            answer = problem
        connection.send(answer)


if __name__ == "__main__":
    main()
    exit_process(0)
