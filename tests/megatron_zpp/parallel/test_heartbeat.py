"""A rank that dies, is stopped, or whose main thread hangs is noticed in time, and named."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zeropp
from megatron_zpp.parallel import heartbeat
from megatron_zpp.parallel.heartbeat import WAITING_IN, Glance, Heartbeat, MainThread
from tests.launched import LAUNCH, kill_all, start, wait_for
from tests.ranks import ranks

MINUTES = 0.1
TRAINING = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--zero-stage 3 --eval-iters 0 --lr 1e-3 --train-iters 1000000 --save-interval 3 "
    f"--distributed-timeout-minutes {MINUTES} --save "
)
# Rank 1 reads from a pipe that nobody writes to: only its other threads go on.
HANGING = """
import os, sys, time
from megatron_zpp.data.loader import Loader
from megatron_zpp.commands.pretrain import main
from torch.distributed.checkpoint import FileSystemWriter
from zeropp.ranks.exit import exit_process

_, local_rank, where, *flags = sys.argv
owner, name = {"data": (Loader, "__next__"), "file": (FileSystemWriter, "write_data")}[where]
method, calls = getattr(owner, name), []

def hang(*arguments):
    calls.append(0)
    if len(calls) == (5 if name == "__next__" else 1) and os.environ["RANK"] == "1":
        print("hanging since", time.time(), flush=True)
        os.read(os.pipe()[0], 1)
    return method(*arguments)

setattr(owner, name, hang)
exit_process(main(flags))
"""


@pytest.mark.parametrize("where", ["data", "file"])
def test_a_rank_whose_main_thread_hangs_ends_the_job_within_the_time_limit(where, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    flags = (TRAINING + str(tmp_path / "save")).split()
    command = [*LAUNCH, "--num_ranks", "2", str(tmp_path / "hanging.py"), where, *flags]
    process, log = start(command, tmp_path / "log", tmp_path), tmp_path / "log"
    try:
        wait_for("hanging since", log, process)
        status = process.wait(60)
        ended = time.time()
    finally:
        if process.poll() is None:
            kill_all(process)
    text = log.read_text()
    began = float(re.search(r"hanging since (\S+)", text)[1])
    noticed = float(re.search(r"for (\d+) s", text)[1])
    slack = 15  # of a busy machine, where the rank that waits may end before the one that hangs
    assert max(noticed, ended - began) < 60 * MINUTES + slack, text
    assert "rank 1 hangs: its main thread is at " in text and "hang" in text
    ends = {1: "zeropp: rank 1 exited with code 1", 75: "zeropp: rank 0 exited with code 75"}
    assert text.splitlines()[-1] == ends[status] and "Traceback" not in text, text


class Posing:
    """Stands for a main thread that does what it is told."""

    def __init__(self, marks: int = 0, waits: bool = False) -> None:
        self.now = Glance(marks, 0, waits, f"line {marks}")

    def look(self) -> Glance:
        return self.now


@pytest.fixture
def posing(monkeypatch) -> Iterator[tuple[Callable, list[int]]]:
    """Start heartbeats of one store in this process, with given main threads; close them."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "GRACE_SECONDS", 600)
    statuses = []  # of processes that would end here
    monkeypatch.setattr(heartbeat.os, "_exit", statuses.append)
    monkeypatch.setattr(heartbeat, "SUSPECT_SECONDS", 0.3)
    store = dist.TCPStore("localhost", 0, is_master=True)
    running = []

    def run(*threads: Posing, limit: float = 1.0, num_ranks: int = 0) -> list[Heartbeat]:
        number = num_ranks or len(threads)
        running.extend(
            Heartbeat(store, rank, number, thread, limit) for rank, thread in enumerate(threads)
        )
        return running

    yield run, statuses
    for each in running:
        each.close()


def failure_within(seconds: float, watch: Heartbeat) -> str | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and watch._failure() is None:
        time.sleep(0.02)
    return watch._failure()


def test_the_rank_that_has_passed_fewer_marks_hangs(posing):
    """On GPUs all main threads look alike: they wait for the device."""
    run, statuses = posing
    watches = run(Posing(8), Posing(7), Posing(8))
    failure = failure_within(1.0, watches[0])
    assert failure.startswith("rank 1 hangs: its main thread is at line 7 for ")
    assert [watch.is_of_this_rank(failure) for watch in watches] == [False, True, False]
    deadline = time.monotonic() + 1
    while not statuses and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(statuses) == {1}  # at once: its main thread cannot end by itself


def test_the_rank_that_is_in_no_collective_hangs(posing):
    watches = posing[0](Posing(7, waits=True), Posing(7, waits=True), Posing(7))
    assert failure_within(1.0, watches[0]).startswith("rank 2 hangs")


def test_the_rank_that_waits_elsewhere_than_others_is_named(posing):
    """As one that has left out a step: all wait, and none is behind."""
    threads = [Posing(7, waits=True) for _ in range(4)]
    threads[2].now = replace(threads[2].now, where="evaluate")
    watches = posing[0](*threads)
    failure = failure_within(1.0, watches[0])
    assert failure.startswith("rank 2 waits elsewhere than others for ")
    assert "rank 2 at evaluate; ranks 0, 1, 3 at line 7. " in failure
    assert [watch.is_of_this_rank(failure) for watch in watches] == [False, False, True, False]


def test_ranks_that_all_do_something_long_do_not_hang(posing):
    watches = posing[0](Posing(7), Posing(7))
    assert failure_within(1.2, watches[0]) is None


def test_ranks_that_go_on_do_not_hang(posing):
    threads = Posing(7, waits=True), Posing(6)
    (watch, _) = posing[0](*threads, limit=2.0)
    for number in range(40):
        time.sleep(0.05)
        for thread in threads:
            thread.now = replace(thread.now, marks=thread.now.marks + 1, stack=number)
    assert watch._failure() is None


def test_a_rank_that_has_finished_neither_hangs_nor_died(posing):
    watch, other = posing[0](Posing(7, waits=True), Posing(6))
    other.close()
    assert failure_within(1.2, watch) is None


def test_a_rank_without_a_heartbeat_is_noticed_within_the_time_limit(posing):
    (watch,) = posing[0](Posing(waits=True), num_ranks=2)
    assert failure_within(1.0, watch) == "rank 1 died or stopped responding"


def test_the_rank_that_keeps_the_store_stops_last():
    store = dist.HashStore()
    first, second = (Heartbeat(store, rank, 2, MainThread(), 60) for rank in range(2))
    ended = threading.Thread(target=lambda: first.close(keeps_store=True))
    ended.start()
    ended.join(2 * heartbeat.BEAT_SECONDS)
    assert ended.is_alive()
    second.close()
    ended.join(heartbeat.GRACE_SECONDS)
    assert not ended.is_alive()


def test_what_the_main_thread_does_is_seen_from_another_one():
    main_thread, glances = MainThread(), []
    looking = threading.Timer(0.1, lambda: glances.append(main_thread.look()))
    looking.start()
    main_thread.mark()
    looking.join()
    (glance,) = glances
    assert glance.marks == 1 and not glance.waits
    assert re.fullmatch(r"threading.py:\d+ in \w+", glance.where)
    folders = Path(torch.__file__).parent.parent, Path(zeropp.__file__).parent.parent
    assert all(any((folder / file).exists() for folder in folders) for file in WAITING_IN)


@ranks(2)
def test_waiting_for_another_rank_is_seen_as_such(tmp_path):
    main_thread, seen = MainThread(), tmp_path / "seen"
    assert not main_thread.look().waits

    def look() -> None:
        deadline = time.monotonic() + 10
        while not main_thread.look().waits and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.write_text(main_thread.look().where)

    if dist.get_rank() == 1:
        threading.Thread(target=look).start()
    else:
        while not seen.exists():  # as a rank that hangs
            time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
    assert "distributed_c10d.py" in seen.read_text()


STORE_ENDS = """
import os
import torch.distributed as dist
from megatron_zpp.parallel.heartbeat import Heartbeat
from megatron_zpp.parallel.heartbeat import MainThread

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
heartbeat = Heartbeat(client, 1, 2, MainThread(), 60)
del server
print(heartbeat.find_failure(), heartbeat.publish_own_failure("a reason"), flush=True)
heartbeat.close()
os._exit(0)  # before the watch ends the process
"""


def test_a_failed_collective_after_the_launcher_has_gone_is_explained() -> None:
    done = subprocess.run([sys.executable, "-c", STORE_ENDS], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "the launcher is gone True\n")


STORE_FALLS_SILENT = """
import threading, time
import torch.distributed as dist
import zeropp
from megatron_zpp.parallel import heartbeat
from megatron_zpp.parallel.heartbeat import MainThread

heartbeat.BEAT_SECONDS = 0.05
heartbeat.Heartbeat._last_beat = lambda *_: threading.Event().wait()
watch = heartbeat.Heartbeat(dist.HashStore(), 1, 2, MainThread(), 1)
time.sleep(0.5)  # the watch waits for the store
watch.close()
"""


def test_a_rank_that_hears_nothing_from_the_store_ends() -> None:
    """As after a link was cut, which breaks no connection."""
    command = [sys.executable, "-c", STORE_FALLS_SILENT]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 75 and f"rank 1] error: {heartbeat.STORE_SILENT}" in done.stderr
