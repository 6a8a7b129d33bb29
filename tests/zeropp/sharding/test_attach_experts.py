"""Experts that are sharded over other ranks than the rest of their blocks, attached."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import zeropp
from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharding.foreign_experts import (
    HAS_GROUPS,
    LAYOUTS,
    NO_GROUPS,
    sharded_experts,
    tokens_of,
)
from tests.zeropp.small_model import whole
from zeropp import InputError
from zeropp import fsdp_adapter as fsdp
from zeropp.optim.step_or_skip import local_part

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 2}}
ZEROPP = {"zero_optimization": ALL_THREE, "zeropp": {"ranks_per_node": 2}}
STEPPED = ZEROPP | {"zeropp": {"ranks_per_node": 2, "weight_steps": True, "code_messages": True}}
STEPS = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason=NO_GROUPS)


def train(model: FSDPModule, *, micro_batches: int = 2, once: bool = True, steps: int = STEPS):
    """The losses of this rank, and the sums of the whole weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        for index in range(micro_batches):
            model.set_requires_gradient_sync(not once or index == micro_batches - 1)
            loss = model(tokens_of(step, dist.get_rank(), index)) / micro_batches
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [whole(weight).double().sum().item() for weight in model.parameters()]


def last_loss(model: FSDPModule, steps: int = 3) -> float:
    """The mean over all ranks in the last of some steps."""
    losses = torch.tensor(train(model, steps=steps)[0][-2:])
    dist.all_reduce(losses)
    return losses.sum().item() / dist.get_world_size()


@pytest.mark.parametrize("layout", LAYOUTS)
@ranks(4)
def test_with_all_of_zeropp_it_learns_the_same_and_sends_less(layout: str) -> None:
    expected = last_loss(sharded_experts(layout, mp_policy=BF16))
    model = sharded_experts(layout, mp_policy=BF16)
    attached = zeropp.attach(model, STEPPED)
    assert last_loss(model) == pytest.approx(expected, rel=3e-3)
    assert min(attached.traffic.take_coded()) > 0
    across = sum(n for (_, hop), n in attached.traffic.take().items() if hop == "across_nodes")
    plain = attached.plain_traffic(2).items()
    total = torch.tensor([across, 3 * sum(n for (_, hop), n in plain if hop == "across_nodes")])
    dist.all_reduce(total)
    assert 3 * total[0] < total[1]
    model(tokens_of(0, dist.get_rank()))
    assert all(map(attached.kept.has_current_copy, attached._planned.values()))


@pytest.mark.parametrize("layout", ["torchtitan", "transformers"])
@ranks(4)
def test_detached_it_is_what_it_was(layout: str) -> None:
    model = sharded_experts(layout)
    before = [*map(fsdp.collectives_of, fsdp.named_units(model).values())]
    attached = zeropp.attach(model, ZEROPP)
    with pytest.raises(InputError, match="has ZeRO\\+\\+'s collectives already"):
        zeropp.attach(model, ZEROPP)
    other = sharded_experts(layout)
    with attached.exact_weights():
        for name, unit in attached.units.items():
            unit.unshard()
            other.get_submodule(name).unshard()
        for own, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local_part(own), local_part(its))
    attached.detach()
    assert before == [*map(fsdp.collectives_of, fsdp.named_units(model).values())]
    assert train(model) == train(sharded_experts(layout))
    assert not any(attached.traffic.take()["gradients", hop] for hop in ("in_node", "across_nodes"))
