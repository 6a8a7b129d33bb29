"""The folder in which all ranks write a checkpoint, until it is published or given up."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.shard_files import os_errors_as_input_errors
from zeropp.ranks.coordination import fail_together, rank


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
