"""Ranks as processes that wait for orders: each order goes to all ranks, and each rank answers.

Orders and answers travel through pipes, not through the network that is measured. The ranks begin
an order within microseconds of each other, so it needs no barrier.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType

from benchmarks.cluster.network import emulation
from benchmarks.shared.processes import start
from benchmarks.shared.rank_launch import RanksFailed
from zeropp.errors import InputError

RANK_MODULE = "benchmarks.cluster.cluster_rank"
ORDER_SECONDS = 600  # for every rank to answer
OUTPUT_CHARACTERS = 3000  # of a dead rank's output that are shown
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORT = 29500  # free in every namespace


class RankFailed(RanksFailed):
    """A rank died or did not answer; the message ends with the rank's last output."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One rank's process, the pipe to it, and the file with its output."""

    rank: int
    popen: subprocess.Popen
    connection: Connection
    output: Path

    @classmethod
    def start(
        cls, rank: int, prefix: Sequence[str], variables: Mapping[str, str], output: Path
    ) -> "RankProcess":
        """Start a rank."""
        ours, theirs = Pipe()
        command = [*prefix, sys.executable, "-m", RANK_MODULE, str(theirs.fileno())]
        variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", **variables}
        popen = start(command, output, variables=variables, pass_fds=[theirs.fileno()])
        theirs.close()
        return cls(rank=rank, popen=popen, connection=ours, output=output)

    def kill(self) -> None:
        """End the process and what it has started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def last_output(self) -> str:
        """How the process ended, if it did, and the end of its output."""
        code = self.popen.poll()
        state = "it runs" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            state = f"killed by {signal.Signals(-code).name}"
        return f"{state}\n{self.output.read_text(errors='replace')[-OUTPUT_CHARACTERS:]}".rstrip()

    def died(self) -> RankFailed:
        """The error that says how."""
        self.popen.wait()
        return RankFailed(f"rank {self.rank} died: {self.last_output()}")


class RankProcesses:
    """All ranks; `ask` gives them an order."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self.processes = tuple(processes)

    def ask(self, order: str, **arguments: object) -> list[dict]:
        """Give every rank the same order; returns their answers in the order of ranks.

        Raises RankFailed for the first rank that dies, or if some do not answer in time; InputError
        with the reason for which a rank refuses.
        """
        for process in self.processes:
            try:
                process.connection.send((order, arguments))
            except (BrokenPipeError, ConnectionResetError):
                raise process.died() from None
        answers: dict[int, dict] = {}
        waiting = {process.connection: process for process in self.processes}
        deadline = time.monotonic() + ORDER_SECONDS
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                late = next(iter(waiting.values()))
                raise RankFailed(
                    f"rank {late.rank} has not answered to {order!r} in {ORDER_SECONDS} s: "
                    f"{late.last_output()}"
                )
            for connection in ready:
                process = waiting.pop(connection)
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise process.died() from None
                if "refused" in answer:
                    raise InputError(answer["refused"])
                answers[process.rank] = answer
        return [answers[process.rank] for process in self.processes]

    def pid_of_each_node(self, ranks_per_node: int) -> list[int]:
        """The process id of each node's first rank."""
        return [process.popen.pid for process in self.processes[::ranks_per_node]]


@contextlib.contextmanager
def started_cluster(
    nodes: int, ranks_per_node: int, round_trip: float | None
) -> Iterator[RankProcesses]:
    """Start the ranks on nodes with links without a limit, `round_trip` seconds apart.

    They are started without a network if it is None, and killed at the end.
    """
    with contextlib.ExitStack() as stack:
        prefixes: list[list[str]] = [[]] * nodes
        if round_trip is None:
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(emulation.free_port()),
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            }
        else:
            stack.enter_context(emulation.emulated_cluster(nodes, round_trip))
            prefixes = [emulation.prefix(node) for node in range(nodes)]
            meeting = {"MASTER_ADDR": emulation.address(0), "MASTER_PORT": str(PORT)}
            variables = {**meeting, **emulation.VARIABLES}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zeropp-cluster-")))
        processes = []
        for rank in range(nodes * ranks_per_node):
            node, local = divmod(rank, ranks_per_node)
            own = {
                "RANK": rank, "WORLD_SIZE": nodes * ranks_per_node,
                "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_node,
                "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
            }  # fmt: skip
            settings = variables | {name: str(value) for name, value in own.items()}
            process = RankProcess.start(rank, prefixes[node], settings, folder / f"rank{rank}")
            stack.callback(process.kill)
            processes.append(process)
        yield RankProcesses(processes)


def exit_on_signals() -> None:
    """Turn signals that end this process into SystemExit, so that clean-up runs."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    """Exit as after the signal; ignore further signals, so that clean-up is not interrupted."""
    for ignored in ENDING_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)
