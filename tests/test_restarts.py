"""A job goes on by itself: launchers start its ranks again, from the last complete checkpoint."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launched import LAUNCH, ROOT, TORCHRUN, kill_all, rank_pid, start, wait_for

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--zero-stage 3 --eval-iters 0 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 1000000 --save-interval 2 --keep-checkpoints 3 "
)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable]:
    """Start pretrain_gpt.py under a launcher; whatever is left of it is killed at the end."""
    processes = []

    def run(launcher: list[str], flags: str = "") -> tuple[subprocess.Popen, Path]:
        log = tmp_path / f"log-{len(processes)}.txt"
        folders = f"--save {tmp_path}/save --load {tmp_path}/save "
        command = [*launcher, str(ROOT / "pretrain_gpt.py"), *(TINY + folders + flags).split()]
        processes.append(start(command, log, tmp_path))
        return processes[-1], log

    yield run
    for process in processes:
        if process.poll() is None:
            kill_all(process)


def loaded(log: Path) -> list[int]:
    """The iterations at which the attempts in a log resumed."""
    return [int(number) for number in re.findall(r"loaded checkpoint of iteration (\d+)", log.read_text())]


def newest(log: Path) -> int:
    """The iteration of the newest checkpoint that a log tells of."""
    return max(int(number) for number in re.findall(r"saved checkpoint \S+/iter_(\d+)", log.read_text()))


def wait_until(
    condition: Callable[[], bool], log: Path, process: subprocess.Popen, seconds: float = 60
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(log.read_text())
        time.sleep(0.05)


@pytest.mark.parametrize(
    "launcher",
    [
        [*LAUNCH, "--num_ranks", "2", "--max_restarts", "2"],
        [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"],
    ],
    ids=["zeropp", "torchrun"],
)
def test_killed_ranks_are_started_again_and_resume(launch: Callable, launcher: list[str]) -> None:
    process, log = launch(launcher)
    for count, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
        wait_until(lambda: log.read_text().count("saved checkpoint") > 0, log, process)
        saved = newest(log)
        os.kill(rank_pid(count % 2, process), number)
        wait_until(lambda count=count: len(loaded(log)) > count, log, process)
        assert loaded(log)[-1] >= saved
        wait_until(lambda: newest(log) > loaded(log)[-1], log, process)
