"""SIGKILL before every change of a file and at random moments: a restart always works."""

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.iteration_folders import Retention
from megatron_zpp.checkpoint.training_state import TrainingState
from tests.launched import call
from tests.megatron_zpp.small_net import names, save_in, state_at
from zeropp.checkpoint.async_save import AsyncWriter
from zeropp.checkpoint.memory_files import MemoryFiles
from zeropp.checkpoint.writer_process import RankWrite, perform

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove"}
NUM_KILLS = 6


def model_of(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an AdamW in which every number is `value`."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    fill(model, optimizer, value)
    return model, optimizer


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)
        moments = {key: torch.full_like(parameter, value) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(value)), **moments}


def loaded(folder: Path) -> TrainingState:
    """Load as one rank; return the state after checking that everything is of one save."""
    model, optimizer = model_of(-1)
    state = checkpoint.load(folder, model, optimizer)
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            assert torch.equal(tensor, torch.full_like(tensor, state.seed))
    return state


# Before every change of a file


class WriterHere(AsyncWriter):
    """Does in this process what the process for asynchronous saves does."""

    def __init__(self) -> None:
        self._memory, self._save, self._reports = MemoryFiles(), None, {}
        self._connection, self._theirs = Pipe()

    def _send(self, message: object) -> None:
        if isinstance(message, RankWrite):
            perform(message, self._memory.descriptor, self._theirs)


def save_and_die(folder: Path, count: int, beside: bool) -> None:
    """Replace iteration 2 by a later version, killed before the count-th change to a file."""
    model, optimizer = model_of(3)
    writer = WriterHere() if beside else None
    left = count

    def watch(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in CHANGES or event == "open" and arguments[2] & os.O_ACCMODE:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save_in(folder, model, optimizer, state_at(2, seed=3), keep=Retention(newest=1), writer=writer)
    if writer is not None:
        writer.finish()


def save_and_die_each_time(before: Path, folders: Path, beside: bool, stride: int) -> None:
    """`save_and_die` in copies of `before`, named after the count, until one is not killed."""
    for count in itertools.count(1, stride):
        folder = shutil.copytree(before, folders / str(count))
        child = os.fork()  # of a process that has imported everything
        if child == 0:
            save_and_die(folder, count, beside)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(("beside", "stride"), [(False, 1), (True, 5)])
def test_kill_before_every_change_of_a_file(beside: bool, stride: int, tmp_path: Path) -> None:
    before, folders = tmp_path / "before", tmp_path / "killed"
    for iteration in (1, 2):
        model, optimizer = model_of(iteration)
        save_in(before, model, optimizer, state_at(iteration, seed=iteration))
    assert call(save_and_die_each_time, before, folders, beside, stride).wait(120) == 0
    seeds, counts = [], sorted(int(folder.name) for folder in folders.iterdir())
    for count in counts:
        folder = folders / str(count)
        state = loaded(folder)
        assert state.iteration == 2  # the old or the new one, but never lost
        seeds.append(state.seed)
        model, optimizer = model_of(4)
        save_in(folder, model, optimizer, state_at(3, seed=4), keep=Retention(newest=1))
        assert loaded(folder).iteration == 3
        assert names(folder) == ["iter_0000003"]
    assert counts[-1] > 25
    assert seeds == sorted(seeds) and set(seeds) == {2, 3}  # from one operation on it is there


# At random moments, two ranks


def join(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )


def save_for_ever(folder: Path, rank: int, store: Path, progress: Path) -> None:
    """Resume, then save each iteration twice, appending which are done, until killed."""
    join(rank, store)
    model, optimizer = model_of(0)
    state = checkpoint.load(folder, model, optimizer)
    iteration = state.iteration if state else 0
    while True:
        iteration += 1
        for attempt in range(2):
            value = 2 * iteration + attempt
            fill(model, optimizer, value)
            save_in(
                folder, model, optimizer, state_at(iteration, seed=value), keep=Retention(newest=2)
            )
            with progress.open("a") as file:
                file.write(f"{value}\n")


def save_beside_for_ever(folder: Path, rank: int, store: Path, progress: Path) -> None:
    """As `save_for_ever`, asynchronously: when a save begins, the one before is done."""
    join(rank, store)
    model, optimizer = model_of(0)
    state = checkpoint.load(folder, model, optimizer)
    begin = state.iteration if state else 0
    writer = AsyncWriter()
    for iteration in itertools.count(begin + 1):
        fill(model, optimizer, iteration)
        state = state_at(iteration, seed=iteration)
        save_in(folder, model, optimizer, state, keep=Retention(newest=2), writer=writer)
        fill(model, optimizer, -1)
        if iteration > begin + 1:
            with progress.open("a") as file:
                file.write(f"{iteration - 1}\n")


@pytest.mark.parametrize(
    ("save", "num_kills"), [(save_for_ever, NUM_KILLS), (save_beside_for_ever, NUM_KILLS // 2)]
)
def test_random_kills_of_two_ranks(save: Callable, num_kills: int, tmp_path: Path) -> None:
    folder, generator, newest = tmp_path / "save", random.Random(1), 0
    for number in range(num_kills):
        store, progress = tmp_path / f"store{number}", tmp_path / f"progress{number}"
        processes = [call(save, folder, rank, store, progress) for rank in range(2)]
        wait_for(progress)
        time.sleep(generator.uniform(0.0, 0.3))
        generator.shuffle(processes)
        for process in processes:
            process.kill()
        for process in processes:
            assert process.wait() == -signal.SIGKILL
        newest = max([newest, *map(int, progress.read_text().split())])
        assert loaded(folder).seed >= newest
    assert newest >= num_kills  # each start saves once at least


def wait_for(progress: Path) -> None:
    """Wait until a rank has saved something."""
    deadline = time.monotonic() + 60
    while not progress.exists():
        assert time.monotonic() < deadline, "the ranks did not save anything"
        time.sleep(0.01)
