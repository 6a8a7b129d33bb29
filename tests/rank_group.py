"""The default process group of the ranks that `ranks.py` starts, kept from one test to the next.

A new group costs little. What costs much is DTensor's sharding propagation: its results belong to
meshes, which belong to groups, so that with a new group all of it would be worked out anew.
"""

import os
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import _collective_utils as dtensor_collectives
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor import debug as dtensor_debug

from tests.ranks import Progress, World
from zeropp.ranks.groups import PREFIX

COLLECTIVE_SECONDS = 290  # no default, and longer than tests may take: who waits so long is killed
KEPT_GROUPS = 4  # a thread of each wakes up a hundred times in a second


class Membership:
    """The default group of this process."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.tests = 0

    def join(self, world: World, rank: int, ranks_per_node: int) -> None:
        """Be a rank of `world`, in the group that this process has or in a new one."""
        _set_environment(world.size, rank, ranks_per_node)
        if world != self.world:
            self._leave()
            dist.init_process_group(
                "gloo",
                init_method=f"file://{world.store}",
                rank=rank,
                world_size=world.size,
                timeout=timedelta(seconds=COLLECTIVE_SECONDS),
            )
            self.world, self.tests = world, 0
            dist.barrier()  # a rank that is done at once would leave while others still connect
        self.tests += 1
        _use_store_of(self.tests)

    def end_test(self) -> Progress | None:
        """Close what a test created beside the default group; return None if it closed that.

        Groups that models share until the default one is closed are kept, if they are few.
        """
        if not dist.is_initialized():
            self.world = None
            forget_meshes()
            return None
        others = [group for group in c10d._world.pg_map if group is not dist.group.WORLD]
        names = [c10d._world.pg_names[group] for group in others]
        if len(others) > KEPT_GROUPS or not all(name.startswith(PREFIX) for name in names):
            for group in others:
                dist.destroy_process_group(group)
            forget_meshes()
        collectives = dist.group.WORLD._get_sequence_number_for_group()
        return Progress(c10d._world.group_count, collectives)

    def _leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            forget_meshes()


def forget_meshes() -> None:
    """Clear DTensor's caches, which keep meshes alive, and with them groups and gloo's threads.

    An equal mesh of the next test would meet this test's closed groups.
    """
    dtensor_debug._clear_sharding_prop_cache()
    dtensor_redistribute._gen_transform_infos.cache_clear()
    dtensor_redistribute.clear_redistribute_planner_cache()
    dtensor_collectives.MeshTopoInfo.build_from_mesh.cache_clear()


def _set_environment(size: int, rank: int, ranks_per_node: int) -> None:
    node, local = divmod(rank, ranks_per_node)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=str(min(ranks_per_node, size)),
        GROUP_RANK=str(node),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
    )


def _use_store_of(test: int) -> None:
    """Let groups of equal names find no addresses of earlier tests."""
    default = dist.group.WORLD
    backend, store = c10d._world.pg_map[default]
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    c10d._world.pg_map[default] = (backend, dist.PrefixStore(f"test {test}", store))
