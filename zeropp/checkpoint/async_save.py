"""Checkpoints that are written while training goes on: it only stops to copy the state.

Each rank copies its shards to shared memory, in the form of the files that a synchronous save would
write, and hands them to a process of its own (`writer_process.py`). One save is under way at a
time. Its errors are raised by the next `save` or by `finish`, on all ranks.

torch.distributed.checkpoint's own `async_save` is not used. It pickles tensors to a process that
imports torch and opens a second process group, whose collectives wait up to 30 minutes for a rank
that died, and it leaves it to the rank to hash and to publish what the process wrote.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import NoReturn, TypeVar

from torch import Tensor

from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.memory_files import MemoryFiles
from zeropp.checkpoint.shard_files import write_shards
from zeropp.checkpoint.shared_folder import partial_checkpoint, with_owner
from zeropp.checkpoint.writer_process import (
    Abort,
    AllWritten,
    Published,
    RankWrite,
    SaveHooks,
    Written,
)
from zeropp.errors import InputError
from zeropp.ranks.coordination import (
    RankError,
    broadcast_object,
    gather_objects,
    rank,
    world_size,
)

SERVE = (
    "import sys; sys.path[:] = {path!r}; "
    "from zeropp.checkpoint.writer_process import serve; serve({connection}, {memory})"
)

log = logging.getLogger("zeropp")

Report = TypeVar("Report", Written, Published)


@dataclass(frozen=True)
class _Save:
    """The save that is under way, the same on all ranks."""

    checkpoints: CheckpointFolder
    name: str
    num_bytes: int

    @property
    def path(self) -> Path:
        """Of the checkpoint, once it is complete."""
        return self.checkpoints.path / self.name


class AsyncWriter(AbstractContextManager):
    """Saves checkpoints while training goes on; all ranks have one, and leave its context together.

    The context's end ends the process, without waiting for a save that is under way: `finish` does.
    """

    def __init__(self) -> None:
        self._memory = MemoryFiles()
        self._connection, theirs = Pipe()
        descriptors = (theirs.fileno(), self._memory.descriptor)
        code = SERVE.format(path=sys.path, connection=descriptors[0], memory=descriptors[1])
        with _signals_blocked(), theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=descriptors
            )
        self._save: _Save | None = None
        self._reports: dict[type, Written | Published] = {}  # of that save

    def save(
        self,
        checkpoints: CheckpointFolder,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        pointer_text: str | None,
        hooks: SaveHooks,
    ) -> None:
        """Copy `tensors` and let them be written as checkpoint `name`; all ranks call it.

        Waits for the save before. When this returns, `tensors` may change. Raises InputError on all
        ranks for errors of the save before, for a folder that cannot be written, and for too little
        disk space or host memory.
        """
        self.finish()
        checkpoints = with_owner(checkpoints)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        with partial_checkpoint(checkpoints, name, num_bytes):
            self._memory.remove_all()
            write_shards(self._memory, tensors)
        job = RankWrite(
            rank=rank(),
            num_ranks=world_size(),
            checkpoints=checkpoints,
            name=name,
            pointer_text=pointer_text,
            files=self._memory.extents,
            hooks=hooks if rank() == 0 else None,
        )
        self._save = _Save(checkpoints, name, num_bytes)
        self._reports.clear()
        self._send(job)

    def finish(self) -> None:
        """Wait until the save that is under way is complete; all ranks call it.

        Raises InputError on all ranks if it failed; the folder is then as it was before.
        """
        if self._save is None:
            return
        try:
            errors = self._wait()
            if errors:
                if rank() == 0:
                    self._save.checkpoints.discard(self._save.name)
                _raise_first(errors, self._save)
        finally:
            self._save = None

    def log_progress(self) -> None:
        """Log what this rank's process has reported, without waiting; any rank may call it."""
        while self._save and Published not in self._reports and self._connection.poll():
            if not self._take_report():
                return

    def close(self) -> None:
        """End the process and free the memory; a save that is under way is abandoned."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._memory.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wait(self) -> dict[int, Exception]:
        """Wait for the end of the save; return the errors by rank, the same on all ranks."""
        written = gather_objects(self._receive(Written))
        errors = {number: part.error for number, part in enumerate(written) if part.error}
        if rank() == 0 and 0 not in errors:
            entries = {name: entry for part in written for name, entry in part.entries.items()}
            self._send(Abort() if errors else AllWritten(entries))
            published = self._receive(Published)
            if not errors and published.error:
                errors[0] = published.error
        return broadcast_object(errors)

    def _send(self, message: RankWrite | AllWritten | Abort) -> None:
        with suppress(BrokenPipeError):  # the process is dead, which `_receive` reports
            self._connection.send(message)

    def _receive(self, kind: type[Report]) -> Report:
        """Wait for the report of this kind; one with an error if the process is dead."""
        while kind not in self._reports:
            if not self._take_report():
                return kind(error=InputError(self._death()))
        return self._reports[kind]

    def _take_report(self) -> bool:
        """Wait for the next report and log it; returns whether the process is still alive."""
        try:
            report = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        self._reports[type(report)] = report
        if isinstance(report, Published) and not report.error:
            log.info("saved checkpoint %s", self._save.path)
            for note in report.notes:
                log.log(note.level, note.text)
        return True

    def _death(self) -> str:
        status = self._process.wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited: {status}"
        return f"the process that writes checkpoints {how}; the checkpoint before is still there"


def _raise_first(errors: Mapping[int, Exception], save: _Save) -> NoReturn:
    """Raise the error of the lowest rank."""
    number = min(errors)
    error, action = errors[number], f"cannot save in {save.checkpoints.path} (rank {number})"
    if isinstance(error, OSError):
        raise InputError(f"{action}: {save.checkpoints.explain(error, save.num_bytes)}")
    if isinstance(error, InputError):
        raise InputError(f"{action}: {error}")
    raise RankError(f"{action}:\n{error}")


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Start processes that Ctrl-C does not end before they have said that they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
