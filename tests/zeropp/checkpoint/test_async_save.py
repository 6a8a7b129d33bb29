"""Asynchronous saves: the same bytes as synchronous ones, and errors that reach every rank."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.launched import call
from tests.ranks import ranks
from zeropp.checkpoint import memory_files
from zeropp.checkpoint.async_save import AsyncWriter
from zeropp.checkpoint.checksums import FileEntry
from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.shard_files import read_shards, write_shards
from zeropp.checkpoint.shared_folder import new_checkpoint, with_owner
from zeropp.checkpoint.writer_process import Note
from zeropp.errors import InputError

LAST = "last.json"


@dataclass(frozen=True)
class ListOfFiles:
    """Completes a checkpoint with a list of its files."""

    def add_last_files(self, partial: Path, entries: dict[str, FileEntry]) -> None:
        (partial / LAST).write_text(json.dumps(sorted(entries)))

    def after_publication(self) -> list[Note]:
        return []


def folder_at(path: Path) -> CheckpointFolder:
    return CheckpointFolder(path=path, pointer="latest", last_file=LAST, own_names="*")


def tensors_of(value: float) -> dict[str, torch.Tensor]:
    """A sharded matrix of which rank 1 has the smaller part, and a tensor that all ranks have."""
    whole = torch.full((7, 30), value)
    if dist.is_initialized():
        whole = distribute_tensor(
            whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)]
        )
    return {"sharded": whole, "step": torch.tensor(value)}


def save(writer: AsyncWriter, path: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    writer.save(folder_at(path), name, tensors, pointer_text=name, hooks=ListOfFiles())


def save_now(path: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    with new_checkpoint(folder_at(path), name, 1, name) as partial:
        write_shards(partial, tensors)
        dist.barrier()
        if dist.get_rank() == 0:
            names = [file.name for file in partial.iterdir()]
            ListOfFiles().add_last_files(partial, dict.fromkeys(names))


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


@ranks(2)
def test_the_files_are_those_of_a_synchronous_save(tmp_path):
    tensors = {**tensors_of(1.0), "halves": torch.arange(5, dtype=torch.bfloat16)}
    save_now(tmp_path / "now", "a", tensors)
    with AsyncWriter() as writer:
        for _ in range(2):  # into fresh memory, and into memory that was used before
            save(writer, tmp_path / "beside", "a", tensors)
        writer.finish()
    assert contents(tmp_path / "beside") == contents(tmp_path / "now")


@ranks(2)
def test_the_state_at_the_time_of_the_call_is_saved(tmp_path):
    tensors = tensors_of(1.0)
    with AsyncWriter() as writer:
        for value, name in ((1.0, "a"), (2.0, "b")):
            for tensor in tensors.values():
                tensor.fill_(value)
            save(writer, tmp_path, name, tensors)
            for tensor in tensors.values():
                tensor.fill_(-1.0)
        assert folder_at(tmp_path).find("a")  # the second save waited for the first
        writer.finish()
        dist.barrier()
        assert folder_at(tmp_path).latest() == "b"
    for value, name in ((1.0, "a"), (2.0, "b")):
        read_shards(tmp_path / name, tensors)
        assert torch.equal(tensors["sharded"].full_tensor(), torch.full((7, 30), value))
        assert tensors["step"].item() == value


def limit_files(writer: AsyncWriter, size: int) -> None:
    """No file of the writer's process grows beyond `size` bytes."""
    resource.prlimit(writer._process.pid, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process")
@pytest.mark.parametrize("full", [0, 1])
@ranks(2)
def test_a_full_disk_under_one_rank_reaches_all_at_the_next_save(full, tmp_path):
    with AsyncWriter() as writer:
        save(writer, tmp_path, "a", tensors_of(1.0))
        writer.finish()
        dist.barrier()
        before = contents(tmp_path)
        if dist.get_rank() == full:
            limit_files(writer, 100)
        save(writer, tmp_path, "b", tensors_of(2.0))
        with pytest.raises(InputError) as error:
            save(writer, tmp_path, "c", tensors_of(3.0))
        assert f"cannot save in {tmp_path} (rank {full}): File too large" in str(error.value)
        dist.barrier()
        assert contents(tmp_path) == before
        assert [path.name for path in tmp_path.glob(".*")] == []
        writer.finish()  # the error was raised once


@ranks(2)
def test_a_process_that_is_killed_is_named_on_all_ranks(tmp_path):
    with AsyncWriter() as writer:
        if dist.get_rank() == 1:
            writer._process.kill()
        save(writer, tmp_path, "a", tensors_of(1.0))
        with pytest.raises(InputError, match=r"\(rank 1\): the process .* killed by SIGKILL"):
            writer.finish()
    dist.barrier()
    assert contents(tmp_path) == {}


@ranks(2)
def test_a_folder_that_is_not_shared_is_an_error(tmp_path):
    own = with_owner(folder_at(tmp_path / str(dist.get_rank())))
    if dist.get_rank() == 1:
        own.partial("a").mkdir(parents=True)
    with AsyncWriter() as writer:
        writer.save(own, "a", tensors_of(1.0), pointer_text="a", hooks=ListOfFiles())
        with pytest.raises(InputError, match="rank 0 does not see __1_0.distcp"):
            writer.finish()


def test_errors_before_the_copy_leave_the_folder_as_it_was(tmp_path, monkeypatch):
    tensors = tensors_of(1.0)
    with AsyncWriter() as writer:
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(InputError, match="cannot save in .*file"):
            save(writer, tmp_path / "file" / "save", "a", tensors)
        monkeypatch.setattr(memory_files, "free_bytes", lambda: 1000)
        with pytest.raises(InputError, match="too little host memory for the copy"):
            save(writer, tmp_path / "save", "a", tensors)
        monkeypatch.undo()
        assert list((tmp_path / "save").iterdir()) == []
        save(writer, tmp_path / "save", "a", tensors)
        writer.finish()
    assert folder_at(tmp_path / "save").latest() == "a"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpus_state_at_the_time_of_the_call_is_saved(tmp_path):
    tensors = {f"{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(20)}
    with AsyncWriter() as writer:
        save(writer, tmp_path, "a", tensors)
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        writer.finish()
    read_shards(tmp_path / "a", tensors)
    assert all((tensor == float(name)).all() for name, tensor in tensors.items())


def test_memory_and_descriptors_do_not_grow(tmp_path):
    descriptors = len(os.listdir("/proc/self/fd"))
    with AsyncWriter() as writer:
        sizes = []
        for number in range(3):
            save(writer, tmp_path, "a", tensors_of(number))
            sizes.append(os.fstat(writer._memory.descriptor).st_size)
        assert sizes[0] == sizes[1] == sizes[2] > 7 * 30 * 4
        save(writer, tmp_path, "b", {"step": torch.tensor(1.0)})  # less than there was
        writer.finish()
    tensors = {"step": torch.tensor(0.0)}
    read_shards(tmp_path / "b", tensors)
    assert tensors["step"].item() == 1.0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_signals_for_the_rank_do_not_end_the_writer(tmp_path):
    with AsyncWriter() as writer:
        save(writer, tmp_path, "a", tensors_of(1.0))
        writer.finish()  # it is past its start
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(writer._process.pid, number)
        save(writer, tmp_path, "b", tensors_of(2.0))
        writer.finish()
    assert folder_at(tmp_path).latest() == "b"


def report_and_hang(path: Path) -> None:
    writer = AsyncWriter()
    path.write_text(str(writer._process.pid))
    time.sleep(60)


def test_the_writer_ends_with_its_rank(tmp_path):
    process = call(report_and_hang, tmp_path / "pid")
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while is_running(writer):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.new_interpreter
def test_the_writer_does_not_import_torch():
    code = (
        "import sys, zeropp.checkpoint.writer_process, megatron_zpp.checkpoint.iteration_folders; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr
