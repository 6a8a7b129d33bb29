"""A checkpoint that all ranks write together while training stops."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeropp.checkpoint.complete_or_absent import CheckpointFolder
from zeropp.checkpoint.partial_checkpoint import partial_checkpoint
from zeropp.ranks.coordination import fail_together, rank


@contextmanager
def new_checkpoint(
    checkpoints: CheckpointFolder, name: str, num_bytes: int, pointer_text: str | None
) -> Iterator[Path]:
    """Yield the folder in which all ranks write checkpoint `name`; publish it at the end.

    As `partial_checkpoint`. `pointer_text` is written to the pointer file, None leaves that as it
    is.
    """
    with partial_checkpoint(checkpoints, name, num_bytes) as partial:
        yield partial
        with fail_together():
            if rank() == 0:
                checkpoints.publish(name, pointer_text)
