"""Operations of all ranks on a folder of checkpoints: hold it, and write a new checkpoint."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.folder_lock import STALE_SECONDS, FolderLock, Process, Seen
from zeropp.checkpoint.shard_files import os_errors_as_input_errors
from zeropp.errors import InputError, unwritable
from zeropp.ranks.coordination import broadcast_object, fail_together, gather_objects, rank

LOOK_SECONDS = 0.5  # between two looks at a lock that may be stale
VISIBLE_SECONDS = 10.0  # after which another machine sees a new file in a folder that is shared

log = logging.getLogger("zeropp")


@contextmanager
def hold_folder(folder: Path, flag: str, *, is_first_on_machine: bool) -> Iterator[FolderLock]:
    """Create `folder` and let no other job save in it; all ranks enter and leave together.

    One rank of each machine tries to write there. Raises InputError on all ranks, with the `flag`
    that names the folder, if another job holds it, if it cannot be written, and if it is not the
    same folder on all machines.
    """
    lock = seen = None
    with _unwritable(folder, flag), fail_together():
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock.of(folder)
            seen = lock.take()
    lock, seen = broadcast_object((lock, seen))
    lock = replace(lock, folder=folder)
    if seen is not None:
        _take_over(lock, seen, flag)
    try:
        with lock.touched() if rank() == 0 else nullcontext():
            with _unwritable(folder, flag), fail_together():
                _require_shared(lock, flag)
                if is_first_on_machine:
                    trial = folder / f".{Process.current().label}.tmp"
                    trial.write_text("")
                    trial.unlink()
            yield lock
    finally:
        if rank() == 0:
            lock.release()


def _take_over(lock: FolderLock, seen: Seen, flag: str) -> None:
    """Replace the lock of a job that has ended; raise InputError on all ranks if it has not.

    A rank on the holder's machine can look for its process. Otherwise the job has ended if its lock
    is no longer touched.
    """
    answers = gather_objects(seen.holder and seen.holder.is_alive())
    is_stale = False in answers
    deadline = time.monotonic() + STALE_SECONDS
    first, is_known = seen, is_stale or True in answers
    if not is_known and rank() == 0:
        waiting = f"waiting {STALE_SECONDS:.0f} s to see whether it lives"
        log.info("%s is held by %s: %s", lock.path, seen, waiting)
    while not is_known:  # in short turns, as the other ranks wait in collectives
        time.sleep(LOOK_SECONDS)
        with _unwritable(lock.folder, flag), fail_together():
            if rank() == 0:
                seen = lock.look()
                is_stale = seen == first and time.monotonic() > deadline
                is_known = is_stale or seen != first
        seen, is_stale, is_known = broadcast_object((seen, is_stale, is_known))
    with _unwritable(lock.folder, flag), fail_together():
        if rank() == 0:
            taken = lock.take_over(first) if is_stale else seen is None and lock.take() is None
            if not taken:
                raise InputError(
                    f"{flag} {lock.folder}: another job saves there, {lock.look() or first}. Give "
                    "each job a folder of its own, or end that job first"
                )
            log.info("%s was held by %s, which has ended: taken over", lock.folder, first)


def _require_shared(lock: FolderLock, flag: str) -> None:
    """Raise InputError unless this rank sees what rank 0 wrote."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not lock.is_held():
        if time.monotonic() > deadline:
            raise InputError(
                f"{flag} {lock.folder}: rank {rank()} on {socket.gethostname()} does not see what "
                f"rank 0 on {lock.process.host} has written there: checkpoints need a folder that "
                "all machines share"
            )
        time.sleep(LOOK_SECONDS)


@contextmanager
def _unwritable(folder: Path, flag: str) -> Iterator[None]:
    """Raise an InputError for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise unwritable(flag, folder, error.strerror) from error


def with_owner(checkpoints: CheckpointFolder) -> CheckpointFolder:
    """Return a folder whose unfinished checkpoints have names of this job; all ranks call it."""
    if checkpoints.owner:
        return checkpoints
    return replace(checkpoints, owner=broadcast_object(Process.current().label))


@contextmanager
def partial_checkpoint(checkpoints: CheckpointFolder, name: str, num_bytes: int) -> Iterator[Path]:
    """Yield the new folder for the files of checkpoint `name`; if the block raises, remove it.

    To be entered by all ranks. `num_bytes` is the space that the checkpoint needs, over all ranks.
    Raises InputError on all ranks for an error of the operating system on any of them, and for too
    little disk space.
    """
    try:
        with os_errors_as_input_errors(
            f"cannot save in {checkpoints.path}",
            lambda error: checkpoints.explain(error, num_bytes),
        ):
            with fail_together():
                if rank() == 0:
                    checkpoints.prepare(name, num_bytes)
            yield checkpoints.partial(name)
    except BaseException:
        if rank() == 0:
            checkpoints.discard(name)
        raise


@contextmanager
def new_checkpoint(
    checkpoints: CheckpointFolder, name: str, num_bytes: int, pointer_text: str | None
) -> Iterator[Path]:
    """Yield the folder in which all ranks write checkpoint `name`; publish it at the end.

    Training stops meanwhile. As `partial_checkpoint`. `pointer_text` is written to the pointer
    file, None leaves that as it is.
    """
    checkpoints = with_owner(checkpoints)
    with partial_checkpoint(checkpoints, name, num_bytes) as partial:
        yield partial
        with fail_together():
            if rank() == 0:
                checkpoints.publish(name, pointer_text)
