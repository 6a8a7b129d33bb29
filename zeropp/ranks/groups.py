"""Process groups that models on the same ranks share, with the default group's time limit.

Only this file knows private names of `torch.distributed`. `dist.new_group` names a group by how
many groups this process has, which differs between ranks where some are in more meshes than others:
the members would then wait for each other forever. It also gives each group PyTorch's default time
limit. Groups are kept in PyTorch's own table, which `dist.destroy_process_group()` empties.
"""

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (makes the backend known)

PREFIX = "zeropp"
FAKE = dist.Backend.FAKE  # for ranks that are only planned: its groups send nothing

# torch 2.14 made it public, and warns of the private one
SET_TIMEOUT = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


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


def _axis_name(axis: Sequence[int]) -> str:
    return f"{PREFIX}/{_digest(axis)}"


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()
