"""Process groups that models on the same ranks share, and errors that say who has not come.

Only this file knows private names of `torch.distributed`. `dist.new_group` names a group by how
many groups this process has, which differs between ranks where some are in more meshes than others:
the members would then wait for each other forever. It also gives each group PyTorch's default time
limit; here it is the default group's. Groups are kept in PyTorch's own table, which
`dist.destroy_process_group()` empties.

If a rank does not come to a collective of gloo, all others fail with "timed out" or a broken
connection, which names neither. Here a rank that has waited for long, or whose wait has failed,
writes what it waits for to the store of the default group. A rank whose wait has failed reads what
the others have written. Otherwise nothing is written or read, and no thread is needed.

    waits/2     the collective in which rank 2 waits, and its ranks; empty when rank 2 goes on
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes the backend known)

PREFIX = "zeropp"
LONG = timedelta(seconds=10)  # a wait that others may want to know of
LINGER_SECONDS = 2.0  # for the others, whose waits fail at about the same time
POLL_SECONDS = 0.05
MOST_ASKED = 64  # ranks, of chains of ranks that wait for each other
FAKE = dist.Backend.FAKE  # for ranks that are only planned: its groups send nothing

# torch 2.14 made it public, and warns of the private one
SET_TIMEOUT = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


class WaitError(RuntimeError):
    """A collective failed, because ranks have not come to it or have ended."""


def shared_group(purpose: str, members: Sequence[int], axis: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of `members` for `purpose`; create it if there is none yet.

    `members` are global ranks in ascending order, this one included, and part of `axis`, the ranks
    of a mesh. Models on one mesh share the group: all members use its models in the same order, as
    they do with the group of the mesh itself. Only the members call this.
    """
    name = f"{_axis_name(axis)}/{purpose}/{_digest(members)}"
    for group, group_name in c10d._world.pg_names.items():
        if group_name == name:
            return group
    default = dist.group.WORLD
    backend, store = c10d._world.pg_map[default]
    if backend != FAKE:  # whose store holds nothing
        # Addresses that a closed group of this name has left in the store must not be read again.
        times_closed = store.add(f"{name}/closed", 0) // len(members)
        store = dist.PrefixStore(str(times_closed), store)
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        list(members),
        backend,
        store,
        name,
        timeout=time_limit(default) or c10d.default_pg_timeout,
        device_id=default.bound_device_id,
        group_desc=f"{PREFIX}_{purpose}",
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def store_of(group: dist.ProcessGroup, subject: str) -> dist.Store:
    """Return the part of the default group's store that is for `subject` among these ranks."""
    _, store = c10d._world.pg_map[dist.group.WORLD]
    name = _axis_name(dist.get_process_group_ranks(group))
    return dist.PrefixStore(f"{name}/{subject}", store)


def close_groups(axis: Sequence[int]) -> None:
    """Close the groups that models on the ranks `axis` of a mesh share; all these ranks call it.

    None of these models can be used afterwards. Models that are sharded later get new groups.
    """
    names = c10d._world.pg_names.items()
    _, store = c10d._world.pg_map[dist.group.WORLD]
    groups = {name: group for group, name in names if name.startswith(f"{_axis_name(axis)}/")}
    for name in sorted(groups):
        group = groups[name]
        dist.barrier(group=group)  # nobody closes what another one still connects
        store.add(f"{name}/closed", 1)
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors in `group` are gloo's."""
    cpu = next((device for device in group._device_types if device.type == "cpu"), None)
    return cpu is not None and isinstance(group._get_backend(cpu), dist.ProcessGroupGloo)


def is_planned(group: dist.ProcessGroup | None) -> bool:
    """Whether a group has no other members to send to. Before torch 2.13 it also copies little."""
    return group is None or dist.get_backend(group) == FAKE


def time_limit(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a collective of `group` may take; None where the backend has no limit."""
    options = [group._get_backend(device).options for device in group._device_types]
    return min((each._timeout for each in options if each is not None), default=None)


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Let collectives of `group` fail after `limit`, if its backend has time limits."""
    if time_limit(group) is not None:
        SET_TIMEOUT(limit, group)


def set_backend_time_limit(backend: dist.ProcessGroupGloo, limit: timedelta) -> None:
    """Let collectives of a backend that belongs to no group of PyTorch's fail after `limit`."""
    backend._set_default_timeout(limit)


def inherit_time_limit(group: dist.ProcessGroup) -> None:
    """Let collectives of `group` fail after the default group's time limit at the latest."""
    own, limit = time_limit(group), time_limit(dist.group.WORLD)
    if None not in (own, limit) and limit < own:
        set_time_limit(group, limit)


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


def _axis_name(axis: Sequence[int]) -> str:
    return f"{PREFIX}/{_digest(axis)}"


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()
