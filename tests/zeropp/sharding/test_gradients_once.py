"""Stages 2 and 3 with gradients that are averaged once per step: the same sums, fewer bytes."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.small_model import small_model, train
from zeropp import Sharding, shard
from zeropp import fsdp_adapter as fsdp

ONCE = {"reduce_gradients_once": True}


def sharded(zero: dict, **settings: object) -> Sharding:
    return shard(small_model(), data_mesh(), zero_config(zero, 2, zeropp=ONCE, **settings))


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}, ALL_THREE])
@ranks(4)
def test_gradients_and_the_root_are_sent_once_per_step(zero):
    sharding = sharded(zero, bf16={"enabled": True})
    train(sharding, rank=dist.get_rank(), num_micro_batches=2, steps=3)
    sent = sharding.traffic.take()
    assert sent == {key: 3 * n for key, n in sharding.expected_traffic(2).items()}
    one, two = sharding.expected_traffic(1), sharding.expected_traffic(2)
    gradients = [("gradients", hop) for hop in ("in_node", "across_nodes")]
    assert all(0 < one[key] == two[key] for key in gradients)
    each_time = shard(small_model(), data_mesh(), zero_config(zero, 2, bf16={"enabled": True}))
    assert all(2 * two[key] == each_time.expected_traffic(2)[key] for key in gradients)


@ranks(2)
def test_whole_gradients_are_kept_until_the_last_micro_batch():
    sharding = sharded({"stage": 3})
    sharding.traffic.take()
    for last in (False, True):
        with sharding.micro_step(last=last):
            sharding.model(torch.arange(6).view(2, 3)).square().mean().backward()
        shards = [shard for unit in sharding.units for shard in fsdp.shards(unit)]
        has_means = [shard.grad is not None for shard in shards]
        assert all(has_means) if last else not any(has_means)
        assert (sharding.traffic.sent["gradients", "in_node"] > 0) == last


def test_at_stage_1_it_says_that_it_changes_nothing():
    config = zero_config({"stage": 1}, zeropp=ONCE)
    assert any("stages 0 and 1 do so anyway" in notice for notice in config.notices())
