"""When a wait fails, the error names what the rank waits for, and which ranks have not come.

If a rank does not come to a collective of gloo, all others fail with "timed out" or a broken
connection, which names neither. Here a rank that has waited for long, or whose wait has failed,
writes what it waits for to the store of the default group. A rank whose wait has failed reads what
the others have written. Otherwise nothing is written or read, and no thread is needed.

    waits/2     the collective in which rank 2 waits, and its ranks; empty when rank 2 goes on
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist

from zeropp.ranks.groups import store_of

LONG = timedelta(seconds=10)  # a wait that others may want to know of
LINGER_SECONDS = 2.0  # for the others, whose waits fail at about the same time
POLL_SECONDS = 0.05
MOST_ASKED = 64  # ranks, of chains of ranks that wait for each other


class WaitError(RuntimeError):
    """A collective failed, because ranks have not come to it or have ended."""


class NamedWork(dist.Work):
    """An asynchronous collective of gloo with a name, which is asked for when it matters."""

    def __init__(self, work: dist.Work, group: dist.ProcessGroup, name: Callable[[], str]) -> None:
        super().__init__()
        self._work, self._group, self._name = work, group, name

    def wait(self, timeout: object = None) -> bool:
        """Wait until the collective has ended. Raises WaitError if it fails."""
        try:
            return self._work.wait(LONG)
        except RuntimeError as error:
            if self._work.is_completed():
                raise _explained(self._group, self._name(), error) from error
        _write(self._group, self._name())
        with explained_waits(self._group, self._name):
            self._work.wait()
        _board().set(str(dist.get_rank()), "")
        return True


@contextmanager
def explained_waits(group: dist.ProcessGroup | None, name: Callable[[], str]) -> Iterator[None]:
    """Raise a WaitError if a collective of `group` (None: of all ranks) in the block fails."""
    try:
        yield
    except (WaitError, torch.OutOfMemoryError):
        raise
    except (dist.DistError, RuntimeError) as error:
        raise _explained(group or dist.group.WORLD, name(), error) from error


def _explained(group: dist.ProcessGroup, name: str, error: RuntimeError) -> WaitError:
    """Return an error that says where the members of a group are."""
    reason = str(error).partition("\n")[0]
    reason = reason.rpartition("] ")[2] if reason.startswith("[") else reason
    try:
        found = _whereabouts(group, name)
    except RuntimeError:
        found = "the store in which ranks say what they wait for is gone"
    return WaitError(
        f"rank {dist.get_rank()} waited in vain in {name}. The others: {found} ({reason})"
    )


def _whereabouts(group: dist.ProcessGroup, name: str) -> str:
    """Say in what the ranks wait that keep this one waiting, and those that keep them waiting."""
    own, notice = dist.get_rank(), _write(group, name)
    wanted, notices = set(dist.get_process_group_ranks(group)), {own: notice}
    deadline = time.monotonic() + LINGER_SECONDS
    while (silent := sorted(wanted - notices.keys())) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for rank in silent:
            if text := _read(rank):
                notices[rank] = text
                if len(wanted) < MOST_ASKED:
                    wanted |= set(json.loads(text)["ranks"])
    by_place: dict[str, list[int]] = {}
    for rank in sorted(wanted - {own}):
        text = notices.get(rank)
        place = "in no collective that zeropp knows of"
        if text:
            place = "in it too" if text == notice else f"in {json.loads(text)['name']}"
        by_place.setdefault(place, []).append(rank)
    return "; ".join(f"{_listed(ranks)}: {place}" for place, ranks in by_place.items())


def _write(group: dist.ProcessGroup, name: str) -> str:
    """Write what this rank waits in; return the text, the same for all ranks that wait in it."""
    text = json.dumps({"name": name, "ranks": dist.get_process_group_ranks(group)})
    _board().set(str(dist.get_rank()), text)
    return text


def _read(rank: int) -> str:
    board = _board()
    return board.get(str(rank)).decode() if board.check([str(rank)]) else ""


def _board() -> dist.Store:
    return store_of(dist.group.WORLD, "waits")


def _listed(ranks: Sequence[int]) -> str:
    """List ranks, runs of them as in 4-7."""
    runs = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        numbers = [rank for _, rank in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"
