"""Ranks of a test that are cut into worlds of their own, as nodes that step alone are."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.rank_group import COLLECTIVE_SECONDS, forget_meshes
from zeropp.optim.local_steps.outer_group import OuterGroup, join_outer_group
from zeropp.ranks.process_group import world_store
from zeropp.ranks.topology import Environment

LIMIT = timedelta(seconds=COLLECTIVE_SECONDS)


@contextmanager
def worlds(size: int, folder: Path) -> Iterator[OuterGroup]:
    """Let worlds of `size` ranks take the place of the default group, which ends."""
    rank, count = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    forget_meshes()
    environment = Environment(rank=rank, world_size=count, local_rank=rank, local_world_size=count)
    world = environment.within(size)
    store = dist.FileStore(str(folder / "worlds"), count)
    dist.init_process_group(
        "gloo",
        store=world_store(store, environment, world),
        rank=world.rank,
        world_size=size,
        timeout=LIMIT,
    )
    outer = join_outer_group(store, environment, world, LIMIT)
    yield outer
    outer.close()
    dist.destroy_process_group()
    forget_meshes()
