"""Ranks of a test that are cut into worlds of their own, as nodes that step alone are."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.rank_group import COLLECTIVE_SECONDS, forget_meshes
from zeropp.capabilities.local_sgd.elastic_group import (
    ElasticGroup,
    ElasticOptions,
    join_elastic_group,
)
from zeropp.capabilities.local_sgd.entry import Saved
from zeropp.capabilities.local_sgd.outer_group import OuterGroup, join_outer_group
from zeropp.ranks.process_group import world_store
from zeropp.ranks.topology import Environment

LIMIT = timedelta(seconds=COLLECTIVE_SECONDS)


@contextmanager
def worlds(size: int, folder: Path) -> Iterator[OuterGroup]:
    """Let worlds of `size` ranks take the place of the default group, which ends."""
    with _own_world(size, folder) as (store, environment, world):
        outer = join_outer_group(store, environment, world, LIMIT)
        yield outer
        outer.close()


@contextmanager
def elastic_nodes(
    folder: Path, iteration: int, num_nodes: int | None = None
) -> Iterator[ElasticGroup]:
    """Let each rank be a node of those that come and go, with a checkpoint of an iteration.

    The run begins with `num_nodes`, by default all; others come when these have begun.
    """
    with _own_world(1, folder) as (store, environment, world):
        num_nodes, server = num_nodes or environment.world_size, None
        if environment.rank == 0:
            server = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
            store.set("port", str(server.port))
        options = ElasticOptions(
            address=f"localhost:{store.get('port').decode()}",
            num_nodes=num_nodes,
            settings={},
            advice="",
            saved_by=lambda number: Saved(iteration),
        )
        while environment.rank >= num_nodes and int(store.add("begun", 0)) < num_nodes:
            time.sleep(0.01)
        outer = join_elastic_group(options, world, LIMIT)
        store.add("begun", 1)
        yield outer
        outer.close()
        store.add("ended", 1)
        while server and int(store.add("ended", 0)) < environment.world_size:
            time.sleep(0.01)


@contextmanager
def _own_world(size: int, folder: Path) -> Iterator[tuple[dist.Store, Environment, Environment]]:
    """Yield a store of all ranks, and this rank among them and in its world, the default group."""
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
    yield store, environment, world
    dist.destroy_process_group()
    forget_meshes()


def wait_for_joiners(outer: ElasticGroup, count: int) -> None:
    """Return when so many nodes are ready to join the next exchange."""
    while not outer.joins and not outer.rounds._store.check([f"joins/{count - 1}"]):
        time.sleep(0.01)
