"""A checkpoint that all ranks write together while training stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.shard_files import os_errors_as_input_errors
from zeropp.ranks.coordination import fail_together, rank


@contextmanager
def new_checkpoint(
    checkpoints: CheckpointFolder, name: str, num_bytes: int, pointer_text: str | None
) -> Iterator[Path]:
    """Yield the folder in which all ranks write checkpoint `name`; publish it at the end.

    To be entered by all ranks. `num_bytes` is the space that the checkpoint needs, over all ranks.
    `pointer_text` is written to the pointer file, None leaves that as it is. If the block raises,
    what it wrote is removed. Raises InputError on all ranks for an error of the operating system
    on any of them, and for too little disk space.
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
            with fail_together():
                if rank() == 0:
                    checkpoints.publish(name, pointer_text)
    except BaseException:
        if rank() == 0:
            checkpoints.discard(name)
        raise
