"""Starts the real scripts under the real launchers, and finds and kills their ranks."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.shared.processes import LAUNCH, ROOT, descendants, kill_all, start

CALL = """
import pickle, sys
function, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
function(*arguments)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@contextlib.contextmanager
def launching(folder: Path) -> Iterator[Callable[[list[str]], tuple[subprocess.Popen, Path]]]:
    """Yield a function that starts a command in `folder` and returns its process and its log.

    Whatever is left of the commands is killed at the end.
    """
    processes = []

    def run(command: list[str]) -> tuple[subprocess.Popen, Path]:
        log = folder / f"log-{len(processes)}.txt"
        processes.append(start(command, log, folder))
        return processes[-1], log

    yield run
    for process in processes:
        if process.poll() is None:
            kill_all(process)


def zeropp(num_ranks: int, script: str, flags: str) -> list[str]:
    """The command line of a script on ranks started by our launcher."""
    return [*LAUNCH, "--num_ranks", str(num_ranks), str(ROOT / script), *flags.split()]


def call(function: Callable, *arguments: object) -> subprocess.Popen:
    """Call a function at the top of a test file in a process of its own."""
    pickled = pickle.dumps((function, arguments)).hex()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", CALL, pickled], env=environment)


def wait_for(text: str, log: Path, process: subprocess.Popen, seconds: float = 90) -> None:
    """Wait until `text` stands in the log; fail with the log if the process ends before."""
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{text!r} never came:\n{log.read_text()}")
        time.sleep(0.05)


def rank_pid(rank: int, launcher: subprocess.Popen) -> int:
    """The process of a rank below a launcher, by its environment or its name (fork_server.py)."""
    for pid in descendants(launcher.pid):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if b"RANK=%d" % rank in variables or name == f"rank {rank}":
            return pid
    raise AssertionError(f"no process has RANK={rank}")
