"""Ranks as processes that wait for orders: each order goes to all ranks, and each rank answers.

Orders and answers travel through pipes, not through the network that is measured. The ranks begin
an order within microseconds of each other, so it needs no barrier.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.shared.rank_launch import RanksFailed
from zeropp.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RANK_MODULE = "benchmarks.cluster.cluster_rank"
ORDER_SECONDS = 600  # for every rank to answer
OUTPUT_CHARACTERS = 3000  # of a dead rank's output that are shown


class RankFailed(RanksFailed):
    """A rank died or did not answer; the message ends with the rank's last output."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One rank's process, the pipe to it, and the file with its output."""

    rank: int
    popen: subprocess.Popen
    connection: Connection
    output: Path

    def last_output(self) -> str:
        """How the process ended, if it did, and the end of its output."""
        code = self.popen.poll()
        state = "it runs" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            state = f"killed by {signal.Signals(-code).name}"
        return f"{state}\n{self.output.read_text(errors='replace')[-OUTPUT_CHARACTERS:]}".rstrip()


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
            self._send(process, (order, arguments))
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
                answers[process.rank] = self._receive(process)
        return [answers[process.rank] for process in self.processes]

    def pid_of_each_node(self, ranks_per_node: int) -> list[int]:
        """The process id of each node's first rank."""
        return [process.popen.pid for process in self.processes[::ranks_per_node]]

    def _send(self, process: RankProcess, order: tuple) -> None:
        try:
            process.connection.send(order)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(process) from None

    def _receive(self, process: RankProcess) -> dict:
        try:
            answer = process.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(process) from None
        if "refused" in answer:
            raise InputError(answer["refused"])
        return answer

    def _died(self, process: RankProcess) -> RankFailed:
        process.popen.wait()
        return RankFailed(f"rank {process.rank} died: {process.last_output()}")


@contextmanager
def started_ranks(
    prefixes: Sequence[Sequence[str]], ranks_per_node: int, variables: Mapping[str, str]
) -> Iterator[RankProcesses]:
    """Start `ranks_per_node` ranks on each node; kill them at the end.

    `prefixes` are those of the commands that start ranks, one for each node; `variables` are added
    to the environment of all ranks.
    """
    world = len(prefixes) * ranks_per_node
    processes: list[RankProcess] = []
    with tempfile.TemporaryDirectory(prefix="zeropp-cluster-") as folder:
        try:
            for rank in range(world):
                node, local = divmod(rank, ranks_per_node)
                own = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(ranks_per_node),
                    "GROUP_RANK": str(node),
                    "GROUP_WORLD_SIZE": str(len(prefixes)),
                }
                output = Path(folder) / f"rank{rank}"
                processes.append(_start(rank, prefixes[node], {**variables, **own}, output))
            yield RankProcesses(processes)
        finally:
            for process in processes:
                _kill(process)


def _start(
    rank: int, prefix: Sequence[str], variables: Mapping[str, str], output: Path
) -> RankProcess:
    """Start a rank in a session of its own, which Ctrl-C does not reach."""
    ours, theirs = Pipe()
    common = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    program = [sys.executable, "-m", RANK_MODULE, str(theirs.fileno())]
    with output.open("wb") as file:
        popen = subprocess.Popen(
            [*prefix, *program],
            cwd=ROOT,
            env={**os.environ, **common, **variables},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    theirs.close()
    return RankProcess(rank=rank, popen=popen, connection=ours, output=output)


def _kill(process: RankProcess) -> None:
    process.connection.close()
    with suppress(ProcessLookupError):  # it has ended already
        os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.wait()
