"""When a checkpoint is complete, and why its folder never holds half of one.

    FOLDER/NAME              a complete checkpoint
    FOLDER/.NAME.OWNER.tmp   a checkpoint that is being written, or was when its job was killed
    FOLDER/.NAME.replaced    the previous NAME, while a new one takes its place
    FOLDER/POINTER           a text file that names the latest checkpoint

A checkpoint is complete when its last file is there (`CheckpointFolder.is_complete`). All ranks
write into `.NAME.OWNER.tmp`, rank 0 adds the last file, flushes the folder to disk and renames it
to `NAME`; only then the pointer file is replaced. A job that is killed at any moment leaves the
previous checkpoint or the new one. Files that are lost or changed later are found by
`megatron_zpp.checkpoint.manifest`. OWNER is the label of the job's first process
(`folder_lock.py`).

`shared_folder.py` does this with all ranks while training stops, `async_save.py` in processes
beside training. Nothing here needs torch, as those processes do not import it.
"""

import errno
import glob
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from zeropp.atomic import sync_folder, write_atomically
from zeropp.checkpoint.folder_lock import FolderLock, Process
from zeropp.errors import InputError, first_few

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFT_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A folder of checkpoints.

    Args:
        path: the folder.
        pointer: name of the file that names the latest checkpoint.
        last_file: name of the file that completes a checkpoint.
        own_names: glob pattern of checkpoint names that only this job writes. What interrupted
            saves left of these is removed before the next save; None stands for the name that is
            saved, as other jobs may be writing other names.
        owner: the label of the process whose job writes. What other jobs leave is removed once
            they are known to have ended, or have written nothing for a day.
        lock: this job's lock of the folder, with which no other job writes there.
        disk_full_advice: the last sentence of the error message when the disk is full.
    """

    path: Path
    pointer: str
    last_file: str
    own_names: str | None = None
    owner: str = ""
    lock: FolderLock | None = None
    disk_full_advice: str = ""

    def is_complete(self, checkpoint: Path) -> bool:
        """Whether `checkpoint` was written to its end: its last file is there."""
        return (checkpoint / self.last_file).is_file()

    def find(self, name: str) -> Path | None:
        """Path of the complete checkpoint `name`, also if a save was killed while replacing it."""
        for checkpoint in (self.path / name, self._replaced(name)):
            if self.is_complete(checkpoint):
                return checkpoint
        return None

    def latest(self) -> str | None:
        """Text of the pointer file, without white space around it; None if there is no such file.

        Raises OSError.
        """
        pointer = self.path / self.pointer
        if not pointer.exists():
            return None
        return pointer.read_text(errors="replace").strip()

    def prepare(self, name: str, num_bytes: int) -> None:
        """Make the empty folder `partial(name)`, after removing what interrupted saves left.

        `num_bytes` is the space that the checkpoint needs. Raises OSError, also for too little
        disk space, and InputError if another job has taken the folder over.
        """
        self._require_lock()
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers(name)
        if shutil.disk_usage(self.path).free < num_bytes:
            raise OSError(errno.ENOSPC, "too little space left", str(self.path))
        self.partial(name).mkdir()

    def publish(self, name: str, pointer_text: str | None) -> None:
        """Rename `partial(name)`, which must be complete, to `name`.

        `pointer_text` is written to the pointer file, None leaves that as it is. Raises OSError,
        and InputError if another job has taken the folder over.
        """
        partial, checkpoint, replaced = self.partial(name), self.path / name, self._replaced(name)
        self._require_lock()
        if not self.is_complete(partial):
            raise InputError(f"{partial} has no {self.last_file}: the checkpoint is not complete")
        sync_folder(partial)
        if checkpoint.exists():
            checkpoint.rename(replaced)
        partial.rename(checkpoint)
        sync_folder(self.path)
        if pointer_text is not None:
            write_atomically(
                self.path / self.pointer, lambda file: file.write(pointer_text.encode())
            )
        if replaced.exists():
            shutil.rmtree(replaced)

    def discard(self, name: str) -> None:
        """Remove `partial(name)` after a save that failed, as far as the system allows it."""
        shutil.rmtree(self.partial(name), ignore_errors=True)

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint; if that is interrupted, no part of it stays under its name."""
        partial = self.partial(checkpoint.name)
        checkpoint.rename(partial)
        shutil.rmtree(partial)

    def partial(self, name: str) -> Path:
        """The folder in which all ranks write checkpoint `name`."""
        return self.path / f".{name}.{self.owner}.tmp"

    def explain(self, error: OSError, num_bytes: int) -> str:
        """Say what an error of the system means for a checkpoint of `num_bytes`."""
        if error.errno not in DISK_FULL:
            return str(error)
        free = shutil.disk_usage(self.path).free
        return (
            f"{error.strerror}. The checkpoint needs {num_bytes:,} bytes, {free:,} are free there. "
            f"{self.disk_full_advice}"
        )

    def _require_lock(self) -> None:
        if self.lock is not None:
            self.lock.require_held()

    def _is_left(self, partial: Path, names: str) -> bool:
        """Whether a folder is a partial checkpoint of one of `names` that nobody writes now."""
        name, _, owner = partial.name.removeprefix(".").removesuffix(".tmp").rpartition(".")
        process = Process.of_label(owner)
        if process is None:  # of a version that knew no owners, or of a longer name
            return fnmatchcase(partial.name, f".{names}.tmp")
        if not fnmatchcase(name, names):
            return False
        if self.lock is not None or owner == self.owner:
            return True
        alive = process.is_alive()
        if alive is None:  # on another machine, whose clock may differ by minutes
            newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            return time.time() - newest > LEFT_SECONDS
        return not alive

    def _replaced(self, name: str) -> Path:
        return self.path / f".{name}.replaced"

    def _remove_leftovers(self, name: str) -> None:
        """Remove what interrupted saves left, and restore a checkpoint that was being replaced."""
        names = self.own_names or glob.escape(name)
        for replaced in self.path.glob(f".{names}.replaced"):
            checkpoint = self.path / replaced.name.removeprefix(".").removesuffix(".replaced")
            if checkpoint.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(checkpoint)
        for partial in self.path.glob(".*.tmp"):
            if partial.is_dir() and self._is_left(partial, names):
                shutil.rmtree(partial)
        if self.own_names:
            for pointer in self.path.glob(f".{self.pointer}.*.tmp"):  # of `write_atomically`
                pointer.unlink()


def require_visible(partial: Path, names: Iterable[str]) -> None:
    """Raise InputError unless rank 0 sees these files, which all ranks have written."""
    missing = [name for name in names if not (partial / name).exists()]
    if missing:
        raise InputError(
            f"rank 0 does not see {first_few(missing)} in {partial}: checkpoints need a folder "
            "that all nodes share"
        )
