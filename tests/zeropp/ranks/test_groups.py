"""Process groups: shared, with the time limit that was asked for, closed, and never mixed up."""

import gc
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.rank_group import COLLECTIVE_SECONDS
from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharded_training import shard_on_nodes
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, shard
from zeropp.ranks.groups import inherit_time_limit, set_time_limit, shared_group, time_limit


def open_descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def train(sharding, *, step: int = 0) -> list[torch.Tensor]:
    """Gradients of a step, whole."""
    position = dist.get_rank(sharding.group)
    tokens = tokens_of(step).chunk(sharding.num_ranks)[position]
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens).backward()
    return [weight.grad.full_tensor() for weight in sharding.model.parameters()]


@pytest.mark.parametrize("zero", [ALL_THREE, {"stage": 0}])
@ranks(4)
def test_every_group_has_the_time_limit_of_the_default_group(zero):
    init_device_mesh("cpu", (2, 2))  # the user's own keeps what it was given
    mesh = data_mesh()
    before = set(c10d._world.pg_names)
    shard(small_model(), mesh, zero_config(zero, 2))
    new = set(c10d._world.pg_names) - before
    assert len(new) == (4 if zero["stage"] else 1)
    assert {time_limit(group) for group in new} == {timedelta(seconds=COLLECTIVE_SECONDS)}


@ranks(4)
def test_the_mesh_of_a_part_of_the_ranks_has_it_too():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "data"))["data"]
    assert time_limit(mesh.get_group()) == timedelta(minutes=30)  # PyTorch's default
    shard(small_model(), mesh, zero_config({"stage": 3}, 2))
    assert time_limit(mesh.get_group()) == timedelta(seconds=COLLECTIVE_SECONDS)
    set_time_limit(mesh.get_group(), timedelta(seconds=5))
    inherit_time_limit(mesh.get_group())
    assert time_limit(mesh.get_group()) == timedelta(seconds=5)  # what is shorter stays


@pytest.mark.parametrize("zero", [ALL_THREE, {"stage": 0}])
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux says what is open")
@ranks(4)
def test_sharding_models_again_and_again_opens_nothing_new(zero):
    config = zero_config(zero, 2)
    shard(small_model(), data_mesh(), config)
    before = open_descriptors_and_threads()
    for _ in range(3):
        shard(small_model(), data_mesh(), config)
    after = open_descriptors_and_threads()
    assert after[0] <= before[0] and after[1] <= before[1]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux says what is open")
@ranks(4)
def test_closed_groups_leave_nothing_open_and_new_ones_work():
    expected = train(shard_on_nodes(ALL_THREE, small_model()))
    opened = []
    for _ in range(3):
        sharding = shard_on_nodes(ALL_THREE, small_model())
        for gradient, same in zip(train(sharding), expected, strict=True):
            assert torch.equal(gradient, same)
        sharding.close_groups()
        del sharding
        gc.collect()
        opened.append(open_descriptors_and_threads())
    assert opened[2][0] <= opened[1][0] and opened[2][1] <= opened[1][1]


@ranks(4)
def test_ranks_with_different_numbers_of_groups_find_each_other():
    """`dist.new_group` names a group by how many groups a rank has: these would wait forever."""
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        train(shard(small_model(), half, zero_config({"stage": 3}, 1)))  # the others make none
    train(shard(small_model(), data_mesh(), zero_config(ALL_THREE, 2)))


@ranks(2)
def test_groups_of_an_earlier_default_group_are_never_met():
    first = shared_group("weights", [0, 1], [0, 1])
    assert shared_group("weights", [0, 1], [0, 1]) is first
    assert shared_group("gradients", [0, 1], [0, 1]) is not first
    store = c10d._world.pg_map[dist.group.WORLD][1]
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("2", store), rank=rank, world_size=2)
    second = shared_group("weights", [0, 1], [0, 1])
    assert second is not first
    ones = torch.ones(1)
    dist.all_reduce(ones, group=second)
    assert ones.item() == 2


@ranks(4)
def test_a_mesh_that_cannot_be_used_is_explained():
    config = zero_config({"stage": 3}, 4)
    reversed_mesh = DeviceMesh("cpu", [3, 2, 1, 0])
    with pytest.raises(InputError, match="ascending order"):
        shard(small_model(), reversed_mesh, config)
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() >= 2:
        with pytest.raises(InputError, match=r"rank [23] is not in the mesh of ranks \[0, 1\]"):
            shard(small_model(), half, config)
