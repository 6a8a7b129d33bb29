"""Meetings of ranks at the store, before a collective to which some of them may never come.

A collective waits for all ranks of its group, however long. Here a rank learns which ones are
absent, or that one of them has failed, and raises instead. Ranks that do something else meanwhile
are not involved: nothing of the process group is used, only the store through which it was made.

    <subject>/<ranks>/<rank>/calls      how many meetings this rank has come to
    <subject>/<ranks>/calls             the sum of these over the ranks
    <subject>/<ranks>/<number>/<rank>   set by those who came to one of them, counted by `arrived`
    <subject>/<ranks>/<number>/outcome  HELD, MISSED or a pickled exception; the first one stays
"""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from zeropp.errors import picklable
from zeropp.ranks.coordination import RankError
from zeropp.ranks.groups import store_of, time_limit

HELD, MISSED = b"held", b"missed"
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.1  # seconds between two looks at the store


class AbsentRanksError(RuntimeError):
    """`ranks` of a group did not come to a meeting before the others gave up.

    `are_ahead` says that some wait at a later one.
    """

    def __init__(self, ranks: list[int], *, are_ahead: bool) -> None:
        super().__init__(f"ranks {ranks} did not come")
        self.ranks, self.are_ahead = ranks, are_ahead


def meet(group: dist.ProcessGroup, subject: str, limit: timedelta, *, later: str = "") -> None:
    """Return when all ranks of `group` have called this; all of them then return.

    Raises AbsentRanksError if some have not within `limit`, or are at the next meeting of the
    subject `later`, which this rank has not come to. Ranks that call it later begin a new
    meeting, which the others can join by another call.
    """
    store, rank = store_of(group, subject), dist.get_rank(group)
    number = come(group, subject)
    while store.check([f"{number}/outcome"]):  # others have given up without this rank
        number = come(group, subject)
    next_store = store_of(group, later)
    own = next_store.add(f"{rank}/calls", 0)
    _hold(store, number, group, limit, lambda: next_store.add("calls", 0) > own * group.size())


def come(group: dist.ProcessGroup, subject: str) -> int:
    """Count that this rank comes to a meeting, which it does not wait for; return its number."""
    store = store_of(group, subject)
    store.add("calls", 1)
    return store.add(f"{dist.get_rank(group)}/calls", 1)


@contextmanager
def raising_together(group: dist.ProcessGroup, subject: str) -> Iterator[None]:
    """Run a block on every rank of `group`; if it raises on one, the others raise when they end it.

    They raise that rank's OSError or InputError, or a RankError with its traceback. The rank itself
    waits for nobody, as the others may wait for it inside their blocks. Without an exception, all
    ranks end the block together.
    """
    store, rank = store_of(group, subject), dist.get_rank(group)
    number = come(group, subject)
    try:
        yield
    except Exception as error:
        as_rank_error = f"on rank {rank}:\n{{}}".format
        failure = picklable(error, lambda text: RankError(as_rank_error(text)))
        store.compare_set(f"{number}/outcome", "", pickle.dumps(failure).hex())
        raise
    _hold(store, number, group, time_limit(group))


def _hold(
    store: dist.Store,
    number: int,
    group: dist.ProcessGroup,
    limit: timedelta | None,
    are_ahead: Callable[[], bool] = lambda: False,
) -> None:
    """Come to a meeting and wait for its end; raise what ended it, or AbsentRanksError."""
    store.set(f"{number}/{dist.get_rank(group)}", "")
    if store.add(f"{number}/arrived", 1) == group.size():
        store.compare_set(f"{number}/outcome", "", HELD.decode())
    outcome = _outcome(store, number, limit, are_ahead)
    if outcome == MISSED:
        ranks = [each for each in range(group.size()) if not store.check([f"{number}/{each}"])]
        raise AbsentRanksError(ranks, are_ahead=are_ahead())
    if outcome != HELD:
        raise pickle.loads(bytes.fromhex(outcome.decode()))


def _outcome(
    store: dist.Store, number: int, limit: timedelta | None, are_ahead: Callable[[], bool]
) -> bytes:
    """Wait for the outcome of a meeting; after `limit`, it is MISSED unless it is known by then.

    The store is only looked at: other threads may use it meanwhile.
    """
    end = None if limit is None else time.monotonic() + limit.total_seconds()
    pause = FIRST_PAUSE
    while not store.check([f"{number}/outcome"]):
        if (end is not None and time.monotonic() > end) or are_ahead():
            store.compare_set(f"{number}/outcome", "", MISSED.decode())
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return store.get(f"{number}/outcome")
