"""One job at a time saves in a folder; the lock of a job that has ended is taken over."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.checkpoint.test_complete_or_absent import folder_at, names, save
from zeropp.checkpoint import folder_lock, shared_folder
from zeropp.checkpoint.folder_lock import FolderLock, Process
from zeropp.checkpoint.shared_folder import hold_folder
from zeropp.errors import InputError

ELSEWHERE = "0" * 8
LIVING = replace(Process.current(), machine=ELSEWHERE, host="node7")


@pytest.fixture
def dead() -> Process:
    """A process of this machine that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return replace(Process.current(), pid=ended.pid, ticks=1)


@pytest.fixture
def soon_stale(monkeypatch) -> None:
    for name, seconds in (("TOUCH_SECONDS", 0.05), ("SETTLE_SECONDS", 0.2)):
        monkeypatch.setattr(folder_lock, name, seconds)
    monkeypatch.setattr(shared_folder, "STALE_SECONDS", 0.8)
    monkeypatch.setattr(shared_folder, "LOOK_SECONDS", 0.1)


def hold(folder: Path) -> object:
    return hold_folder(folder, "--save", is_first_on_machine=True)


def held_by(folder: Path, process: Process) -> FolderLock:
    lock = FolderLock(folder, process, "another")
    assert lock.take() is None
    return lock


def test_a_process_is_recognized(dead):
    current = Process.current()
    assert current.is_alive() and dead.is_alive() is False and LIVING.is_alive() is None
    assert replace(current, ticks=current.ticks + 1).is_alive() is False  # its number, used again
    label = Process.of_label(current.label)
    assert label.label == current.label and label.is_alive()
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    _, ticks = folder_lock._state_and_ticks(zombie.pid)
    zombie_process = replace(current, pid=zombie.pid, ticks=ticks)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert zombie_process.is_alive() is False
    zombie.wait()


def test_the_second_job_is_refused_and_told_who_is_there(tmp_path):
    folder = tmp_path / "new" / "save"
    with hold(folder):
        first = (folder / ".lock").read_text()
        with pytest.raises(InputError) as error, hold(folder):
            pass
        assert (folder / ".lock").read_text() == first
    message = str(error.value)
    assert f"process {os.getpid()} on {socket.gethostname()}, started 20" in message
    assert message.startswith(f"--save {folder}: another job saves there")
    assert names(folder) == []
    with hold(folder):
        pass


@pytest.mark.parametrize("text", ["", '{"process": {}}'])
def test_a_lock_that_was_not_written_to_its_end_is_stale_later(text, tmp_path, soon_stale):
    (tmp_path / ".lock").write_text(text)
    began = time.monotonic()
    with hold(tmp_path) as lock:
        assert time.monotonic() - began > 0.8 and lock.is_held()
    assert names(tmp_path) == []


def test_the_lock_of_a_dead_job_is_taken_over_at_once_and_its_files_are_removed(tmp_path, dead):
    held_by(tmp_path, dead)
    (tmp_path / f".a.{dead.label}.tmp").mkdir()
    began = time.monotonic()
    with hold(tmp_path) as lock:
        assert time.monotonic() - began < 10  # less than until an untouched one is stale
        folder = replace(folder_at(tmp_path, "*"), owner=lock.process.label, lock=lock)
        save(folder, "a", "first")
        assert names(tmp_path) == [".lock", "a", "latest"]


def test_a_job_on_another_machine_lives_as_long_as_it_touches_its_lock(tmp_path, soon_stale):
    other = held_by(tmp_path, LIVING)
    with other.touched(), pytest.raises(InputError, match="on node7, started"), hold(tmp_path):
        pass
    with hold(tmp_path) as lock:  # nobody touches it any more
        assert lock.is_held()
        with pytest.raises(InputError, match="was taken over by process"):
            other.require_held()
        other.release()
        assert lock.is_held()
    with other.touched():  # it lives, but was given up
        with pytest.raises(InputError, match="this checkpoint is not written"):
            with hold(tmp_path):
                save(replace(folder_at(tmp_path), lock=other), "a", "first")
    assert names(tmp_path) == []


def test_nobody_touches_a_lock_that_is_given_up(tmp_path, monkeypatch):
    lock, touching, touch = held_by(tmp_path, LIVING), threading.Event(), os.utime

    def touch_slowly(path: Path) -> None:
        touching.set()
        time.sleep(0.2)
        touch(path)

    monkeypatch.setattr(folder_lock, "TOUCH_SECONDS", 0.1)
    monkeypatch.setattr(os, "utime", touch_slowly)
    with lock.touched():
        assert touching.wait(10)
    seen = lock.look()
    time.sleep(0.4)
    assert lock.look() == seen


def test_of_two_that_take_a_lock_over_one_has_it(tmp_path, dead, soon_stale):
    for _ in range(5):
        stale = held_by(tmp_path, dead).look()
        locks = [replace(FolderLock.of(tmp_path), process=LIVING), FolderLock.of(tmp_path)]
        with ThreadPoolExecutor(2) as threads:
            taken = list(threads.map(lambda lock, seen: lock.take_over(seen), locks, [stale] * 2))
        assert sum(taken) == 1
        assert [lock.is_held() for lock in locks] == taken
        assert not locks[0].take_over(stale)  # it is not that lock any more
        (tmp_path / ".lock").unlink()


def test_a_folder_whose_lock_was_removed_is_held_again(tmp_path):
    with hold(tmp_path) as lock:
        (tmp_path / ".lock").unlink()
        save(replace(folder_at(tmp_path), lock=lock), "a", "first")
        assert lock.is_held()


def test_two_jobs_without_a_lock_do_not_share_files(tmp_path, dead):
    """As engines do, of which one saves `a` and another one `a.b`."""
    other, gone, elsewhere = Process.current().label, dead.label, LIVING.label
    old = tmp_path / f".a.{ELSEWHERE}-1-1.tmp"
    for name in (f"a.b.{other}", f"a.{gone}", f"a.{elsewhere}", f"a.{ELSEWHERE}-1-1"):
        (tmp_path / f".{name}.tmp").mkdir()
    os.utime(old, (1, 1))
    save(folder_at(tmp_path), "a", "first")
    left = [f".a.{elsewhere}.tmp", f".a.b.{other}.tmp"]
    assert names(tmp_path) == sorted([*left, "a", "latest"])


@ranks(2)
def test_all_ranks_refuse_and_take_over_alike(tmp_path):
    if dist.get_rank() == 0:
        held_by(tmp_path, Process.current())
    dist.barrier()
    with pytest.raises(InputError, match="another job saves there"), hold(tmp_path):
        pass
    # Rank 1 is the one on the machine of a process that has ended.
    if dist.get_rank() == 0:
        FolderLock(tmp_path, Process.current(), "another").release()
        ended = replace(Process.current(), pid=os.getpid(), ticks=1)
        held_by(tmp_path, ended)
        Process.is_alive, is_alive = lambda self: None, Process.is_alive
    try:
        began = time.monotonic()
        dist.barrier()
        with hold(tmp_path) as lock:
            assert time.monotonic() - began < 10 and lock.is_held()
            dist.barrier()
    finally:
        if dist.get_rank() == 0:
            Process.is_alive = is_alive
    # Each machine has a folder of its own.
    folder, seconds = tmp_path / str(dist.get_rank()), shared_folder.VISIBLE_SECONDS
    folder.mkdir()
    shared_folder.VISIBLE_SECONDS = 0.0
    try:
        with pytest.raises(InputError, match="rank 1 on .* does not see .* all machines share"):
            with hold(folder):
                pass
    finally:
        shared_folder.VISIBLE_SECONDS = seconds
