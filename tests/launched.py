"""Starts the real scripts under the real launchers, and finds and kills their ranks."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "import sys; from zeropp.ranks.launcher import main; sys.exit(main())"
LAUNCH = (sys.executable, "-c", LAUNCHER)
CALL = """
import pickle, sys
function, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
function(*arguments)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def start(command: list[str], log: Path, folder: Path) -> subprocess.Popen:
    """Start a command in a process group of its own; what it prints goes to `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )


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


def kill_all(launcher: subprocess.Popen) -> None:
    """SIGKILL the launcher and all its ranks at once, as a power cut would."""
    for pid in [launcher.pid, *descendants(launcher.pid)]:
        with contextlib.suppress(ProcessLookupError):  # a fork server ends with its program
            os.kill(pid, signal.SIGKILL)
    launcher.wait()


def descendants(pid: int) -> list[int]:
    """The processes below one, its children first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [
        below for child in children for below in descendants(int(child))
    ]
