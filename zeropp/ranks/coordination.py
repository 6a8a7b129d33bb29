"""Operations of all ranks: exchange Python objects, fail together, report an error once.

If a block raises on one rank, it raises on all of them, so that no collective waits for a rank that
is gone. Every function also works without a process group, as on a single rank. The ranks are all
there are, or those of the group that an enclosing `with among(group)` names; their numbers are then
those in the group.
"""

import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zeropp.errors import InputError, first_lines, picklable
from zeropp.ranks.groups import explained_waits
from zeropp.ranks.process_group import open_store
from zeropp.ranks.topology import Environment

REPORT_TIMEOUT = timedelta(seconds=10)
REPORT_SECONDS = 2.0
EXCHANGE = "an exchange of objects"
MOST_SHOWN = 8  # differences in an error message

T = TypeVar("T")
_GROUP: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)


class RankError(RuntimeError):
    """An exception of another rank; the message is its traceback."""


@contextmanager
def among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let the block act among the ranks of `group` (of a mesh); None stands for all ranks."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def current_group() -> dist.ProcessGroup | None:
    """Return the group that an enclosing `among` names; None for all ranks."""
    return _GROUP.get()


def rank() -> int:
    """Return this rank's number; 0 without a process group."""
    return dist.get_rank(current_group()) if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size(current_group()) if dist.is_initialized() else 1


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, by rank, on every rank. Values are pickled."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()
    with explained_waits(current_group(), lambda: EXCHANGE):
        dist.all_gather_object(values, value, group=current_group())
    return values


def broadcast_object(value: T | None) -> T:
    """Return rank 0's value on every rank. The value is pickled."""
    if not dist.is_initialized():
        return value
    values = [value]
    with explained_waits(current_group(), lambda: EXCHANGE):
        dist.broadcast_object_list(values, group=current_group(), group_src=0)
    return values[0]


@contextmanager
def fail_together() -> Iterator[None]:
    """Run a block without collectives on every rank; if it raises on one rank, it raises on all.

    The other ranks raise the OSError or InputError of the first failed rank, or a RankError with
    its traceback. All ranks must enter the block.
    """
    error = None
    try:
        yield
    except Exception as exception:  # noqa: BLE001  (raised again on all ranks)
        error = exception
    errors = gather_objects(None if error is None else picklable(error, _as_rank_error))
    if error is not None:
        raise error
    for error_of_rank in errors:
        if error_of_rank is not None:
            raise error_of_rank


@contextmanager
def fail_together_along(groups: Iterable[dist.ProcessGroup]) -> Iterator[None]:
    """As `fail_together`, along each axis of a mesh: an exception of one rank is raised on all.

    `groups` are this rank's lines of ranks, one for each axis, in the same order on all ranks.
    """
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(among(group))
            stack.enter_context(fail_together())
        yield


def require_same(values: Mapping[str, object], advice: str, *, caller: str = "") -> None:
    """Raise InputError on all ranks if one has other values than the first; all ranks call it.

    The error names the values that differ, as text, after the `caller` and before the `advice`. As
    long as none does, only a digest is exchanged.
    """
    texts = {name: str(value) for name, value in values.items()}
    digest = hashlib.blake2b(repr([*texts.items()]).encode(), digest_size=8).digest()
    if len({*gather_objects(digest)}) == 1:
        return
    (host, first), *others = gather_objects((socket.gethostname(), texts))
    for position, (other_host, other) in enumerate(others, start=1):
        ranks = f"rank {_global_rank(0)}", f"rank {_global_rank(position)}"
        differing = [
            f"{name} is {first.get(name, 'absent')} on {ranks[0]} and "
            f"{other.get(name, 'absent')} on {ranks[1]}"
            for name in dict.fromkeys((*first, *other))
            if first.get(name) != other.get(name)
        ]
        if differing:
            where = f" ({ranks[0]} is {host}, {ranks[1]} is {other_host})"
            raise InputError(
                f"{caller}{': ' if caller else ''}{first_lines(differing, MOST_SHOWN)}"
                f"{where if host != other_host else ''}: {advice}"
            )


def _global_rank(position: int) -> int:
    group = current_group()
    return position if group is None else dist.get_global_rank(group, position)


def report_once(environment: Environment, report: Callable[[], None]) -> bool:
    """Call `report` on the first rank of each machine, after rank 0 has; the others wait for that.

    For an error that all ranks meet before they have joined, such as a bad command line: a launcher
    ends all ranks when one has ended, so that no rank may end before rank 0 has reported it. The
    ranks meet at the launcher's store, or at rank 0's, who then ends last. A rank that does not
    hear of rank 0's report within `REPORT_TIMEOUT` calls `report` itself, as then the error may be
    its own: returns whether it is.
    """
    if environment.rank == 0:
        report()
    if environment.world_size == 1:
        return False
    try:
        store = dist.PrefixStore("report", open_store(environment, REPORT_TIMEOUT))
        if environment.rank == 0:
            store.set("reported", "")
            if not environment.launcher_has_store:  # what it has opened ends with this rank
                store.wait(["heard"])
            return False
        store.wait(["reported"])
        if store.add("hearing", 1) == environment.world_size - 1:
            store.set("heard", "")
    except (RuntimeError, ValueError):  # a timeout, or no store at the launcher's address
        if environment.rank != 0:
            report()
        return environment.rank != 0
    if environment.machines > 1 and environment.local_rank == 0:
        report()
    return False


def report_on_each_machine(environment: Environment, report: Callable[[], None]) -> None:
    """Call `report` on the first rank of each machine, for an error that keeps ranks from meeting.

    A launcher ends all ranks of a machine when one has ended: the others give the first one time.
    """
    if environment.local_rank == 0:
        report()
    else:
        time.sleep(REPORT_SECONDS)


def _as_rank_error(text: str) -> RankError:
    number = dist.get_rank() if dist.is_initialized() else 0
    return RankError(f"on rank {number}:\n{text}")
