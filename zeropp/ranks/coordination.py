"""What one rank fails at, all ranks fail at: no collective is left waiting for a rank that raised.

Every function here also works without a process group, as one rank.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from zeropp.errors import InputError

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank's failure, told on this one."""


def rank() -> int:
    """This rank's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, by rank, on all ranks. Values are pickled."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T | None) -> T:
    """Return rank 0's value on all ranks."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def fail_together() -> Iterator[None]:
    """Run a block without collectives on every rank; if it raises on one, it raises on all.

    The others raise the first failing rank's OSError or InputError, or a RankError with its
    traceback. To be entered by all ranks.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    failures = {number: told for number, told in enumerate(gather_objects(_told(error))) if told}
    if error is not None:
        raise error
    if failures:
        raise failures[min(failures)]


def _told(error: Exception | None) -> Exception | None:
    """Return an exception that survives pickling and says the same."""
    if error is None:
        return None
    if type(error) is InputError:
        return InputError(str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    return RankError(f"on rank {rank()}:\n{''.join(traceback.format_exception(error))}")
