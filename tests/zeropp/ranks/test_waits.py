"""A wait for ranks that do not come says what this rank waits in, and which ones are missing."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import ranks
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import attach
from zeropp.ranks import groups
from zeropp.ranks.coordination import gather_objects
from zeropp.ranks.groups import WaitError, set_time_limit

LIMIT = timedelta(seconds=2)
SETTINGS = {
    "zero_optimization": {
        "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True,
    },
    "zeropp": {"ranks_per_node": 2},
}  # fmt: skip


def attached_model() -> torch.nn.Module:
    model = small_model()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    attach(model, SETTINGS)
    for group in dist.distributed_c10d._world.pg_map:
        set_time_limit(group, LIMIT)
    return model


def step(model: torch.nn.Module) -> None:
    loss_of(model, tokens_of(0).chunk(4)[dist.get_rank()]).backward()


@ranks(4)
def test_a_rank_that_leaves_out_a_step_under_attach_is_named():
    """Rank 1, in the other node, waits for rank 0, which waits for rank 2."""
    model = attached_model()
    step(model)
    if dist.get_rank() == 2:
        time.sleep(LIMIT.total_seconds() + 1)  # longer than the others wait
        dist.destroy_process_group()
        return
    with pytest.raises(WaitError) as error:
        step(model)
    message, number = str(error.value), dist.get_rank()
    dist.destroy_process_group()
    here = f"rank {number} waited in vain in the all-gather of weights forward of "
    assert message.startswith(here), message
    assert "rank 2: in no collective that zeropp knows of" in message, message


@ranks(4)
def test_a_rank_that_leaves_out_an_evaluation_is_named_where_ranks_first_compare_versions():
    """They make the group for that then, which lacks a rank, too."""
    model = attached_model()
    with torch.no_grad():
        loss_of(model, tokens_of(0))  # leaves the root gathered
    if dist.get_rank() == 2:
        time.sleep(LIMIT.total_seconds() + 1)  # longer than the others wait
        dist.destroy_process_group()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", "0")  # the tests' ranks do not connect until they send
        with pytest.raises(WaitError) as error, torch.no_grad():
            loss_of(model, tokens_of(0))
    message, number = str(error.value), dist.get_rank()
    dist.destroy_process_group()
    here = f"rank {number} waited in vain in a comparison of the weights' versions. "
    assert message.startswith(here), message
    assert "rank 2: in no collective that zeropp knows of" in message, message


@ranks(2)
def test_ranks_that_wait_for_different_things_name_both():
    group = dist.new_group(timeout=LIMIT)
    other = dist.new_group(timeout=LIMIT)
    for each in (group, other):  # connects them
        dist.all_reduce(torch.ones(1), group=each)
    own, name = (group, "the all-gather of a") if dist.get_rank() == 0 else (other, "a sum of b")
    work = dist.all_reduce(torch.ones(1), group=own, async_op=True)
    with pytest.raises(WaitError) as error:
        groups.NamedWork(work, own, lambda: name).wait()
    names = ["the all-gather of a", "a sum of b"]
    place, rank = dist.get_rank(), 1 - dist.get_rank()
    assert f"rank {place} waited in vain in {names[place]}. " in str(error.value)
    assert f"The others: rank {rank}: in {names[rank]} (" in str(error.value)
    dist.destroy_process_group()


@ranks(2)
def test_a_long_wait_is_announced_and_taken_back():
    groups.LONG, long = timedelta(seconds=0.2), groups.LONG
    try:
        if dist.get_rank() == 1:
            deadline = time.monotonic() + 20
            while not groups._read(0) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert '"a sum"' in groups._read(0)
        total = torch.ones(1)
        work = dist.all_reduce(total, async_op=True)
        assert groups.NamedWork(work, dist.group.WORLD, lambda: "a sum").wait()
        assert total == 2
        gather_objects(0)
        assert groups._read(0) == ""
    finally:
        groups.LONG = long


@ranks(2)
def test_an_exchange_of_objects_says_who_is_missing():
    set_time_limit(dist.group.WORLD, timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(WaitError, match="in an exchange of objects. The others: rank 1: in no"):
            gather_objects(0)
    else:
        time.sleep(3.5)
    dist.destroy_process_group()
