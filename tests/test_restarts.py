"""A job goes on by itself: launchers start its ranks again, from the last complete checkpoint."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launched import LAUNCH, ROOT, TORCHRUN, kill_all, launching, rank_pid

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--zero-stage 3 --eval-iters 0 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 1000000 --save-interval 2 --keep-checkpoints 3 "
)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable]:
    """Start pretrain_gpt.py under a launcher; whatever is left of it is killed at the end."""
    folders = f"--save {tmp_path}/save --load {tmp_path}/save "
    with launching(tmp_path) as run:

        def pretrain(launcher: list[str], flags: str = "") -> tuple[subprocess.Popen, Path]:
            arguments = (TINY + ("" if "--save" in flags else folders) + flags).split()
            return run([*launcher, str(ROOT / "pretrain_gpt.py"), *arguments])

        yield pretrain


def loaded(log: Path) -> list[int]:
    """The iterations at which the attempts in a log resumed."""
    return [
        int(number)
        for number in re.findall(r"loaded checkpoint of iteration (\d+)", log.read_text())
    ]


def newest(log: Path) -> int:
    """The iteration of the newest checkpoint that a log tells of."""
    return max(
        int(number) for number in re.findall(r"saved checkpoint \S+/iter_(\d+)", log.read_text())
    )


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
        [*LAUNCH, "--num_ranks", "2", "--max_restarts", "1"],
        [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1"],
    ],
    ids=["zeropp", "torchrun"],
)
def test_ranks_are_started_again_after_a_kill(launch: Callable, launcher: list[str]) -> None:
    process, log = launch(launcher)
    wait_until(lambda: "saved checkpoint" in log.read_text(), log, process)
    saved = newest(log)
    os.kill(rank_pid(1, process), signal.SIGKILL)
    wait_until(lambda: len(loaded(log)) == 1, log, process)
    assert loaded(log)[-1] >= saved
    wait_until(lambda: newest(log) > loaded(log)[-1], log, process)


def test_a_job_that_loses_a_node_goes_on_with_the_other_one(
    launch: Callable, tmp_path: Path
) -> None:
    """The same samples and batches on two ranks as on four: losses differ by rounding."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-conf"),
        "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3",
        *("--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"),
    ]
    flags = "--lr-decay-style constant --hidden-dropout 0.1 "
    curves = f"{flags} --tensorboard-dir {tmp_path}/curves"
    first, log = launch(agent, curves)
    second, other_log = launch(agent, curves)
    wait_until(lambda: "saved checkpoint" in log.read_text() + other_log.read_text(), log, first)
    kill_all(second)
    wait_until(lambda: "2 micro-batches of 1 on each of 2 ranks" in log.read_text(), log, first)
    resumed = loaded(log)[-1]
    wait_until(lambda: newest(log) >= resumed + 4, log, first)
    kill_all(first)
    lines = (tmp_path / "curves" / "metrics.jsonl").read_text().splitlines()
    elastic = [json.loads(line)["lm_loss"] for line in lines]
    alone = f"--tensorboard-dir {tmp_path}/alone --exit-interval {len(elastic)} --save {tmp_path}/s"
    process, log = launch([sys.executable], f"{flags} {alone}")
    assert process.wait(60) == 0, log.read_text()
    lines = (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["lm_loss"] for line in lines] == pytest.approx(elastic, rel=1e-5)
    assert len(elastic) > resumed
