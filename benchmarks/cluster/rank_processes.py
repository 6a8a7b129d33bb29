"""Ranks as processes that wait for orders: each order goes to all of them, each of them answers.

Orders and answers travel through pipes, never through the network that is measured. The ranks begin
an order within microseconds of each other, so that it needs no barrier.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("cluster_rank.py")
ORDER_SECONDS = 600  # for every rank to answer
OUTPUT_CHARACTERS = 3000  # of a dead rank, that are shown


class RankFailed(RuntimeError):
    """A rank died or did not answer; the text ends with what it printed last."""


class Refused(ValueError):
    """The ranks cannot do what they were told, for a reason that the person can mend."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a node's ranks run: the beginning of their commands, and their variables."""

    inside: Sequence[str] = ()
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One rank's process, the pipe to it, and the file that it prints to."""

    rank: int
    process: subprocess.Popen
    connection: Connection
    output: Path

    def last_words(self) -> str:
        """What the process printed last, and how it ended."""
        code = self.process.poll()
        how = "it runs" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return f"{how}\n{self.output.read_text(errors='replace')[-OUTPUT_CHARACTERS:]}".rstrip()


class Crew:
    """All ranks; `ask` gives them an order."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)

    def ask(self, what: str, **details: object) -> list[dict]:
        """Give every rank the same order, and return their answers in the order of ranks.

        Raises RankFailed for the first rank that dies, or if some do not answer in time; Refused
        with the reason that a rank gives.
        """
        for worker in self.workers:
            self._tell(worker, (what, details))
        answers: dict[int, dict] = {}
        waiting = {worker.connection: worker for worker in self.workers}
        deadline = time.monotonic() + ORDER_SECONDS
        while waiting:
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                late = next(iter(waiting.values()))
                raise RankFailed(
                    f"rank {late.rank} has not answered to {what!r} in {ORDER_SECONDS} s: "
                    f"{late.last_words()}"
                )
            for connection in ready:
                worker = waiting.pop(connection)
                answers[worker.rank] = self._answer(worker)
        return [answers[worker.rank] for worker in self.workers]

    def processes(self, ranks_per_node: int) -> list[int]:
        """One process of each node."""
        return [worker.process.pid for worker in self.workers[::ranks_per_node]]

    def _tell(self, worker: Worker, order: tuple) -> None:
        try:
            worker.connection.send(order)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(worker) from None

    def _answer(self, worker: Worker) -> dict:
        try:
            answer = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died(worker) from None
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _died(self, worker: Worker) -> RankFailed:
        worker.process.wait()
        return RankFailed(f"rank {worker.rank} died: {worker.last_words()}")


@contextmanager
def started_crew(
    num_nodes: int, ranks_per_node: int, host_of: Callable[[int], Host]
) -> Iterator[Crew]:
    """Start `ranks_per_node` ranks on each node; kill them at the end."""
    world = num_nodes * ranks_per_node
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="zeropp-cluster-") as folder:
        try:
            for rank in range(world):
                node, local = divmod(rank, ranks_per_node)
                place = {
                    "RANK": rank, "WORLD_SIZE": world,
                    "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks_per_node,
                    "GROUP_RANK": node, "GROUP_WORLD_SIZE": num_nodes,
                }
                workers.append(_start(rank, host_of(node), place, Path(folder)))
            yield Crew(workers)
        finally:
            for worker in workers:
                _end(worker)


def _start(rank: int, host: Host, place: Mapping[str, int], folder: Path) -> Worker:
    """Start a rank in a session of its own: Ctrl-C is this process's affair."""
    ours, theirs = Pipe()
    output = folder / f"rank{rank}"
    variables = {name: str(value) for name, value in place.items()}
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    command = [*host.inside, sys.executable, str(WORKER), str(theirs.fileno())]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **fixed, **variables, **host.variables},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    theirs.close()
    return Worker(rank=rank, process=process, connection=ours, output=output)


def _end(worker: Worker) -> None:
    worker.connection.close()
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it is dead already
    worker.process.wait()
