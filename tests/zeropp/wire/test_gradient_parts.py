"""Gradients of some parameters only, over several micro-batches, of 16-bit parameters, with hooks.

Every time the averaged gradient of each parameter must be its own, whatever the others have.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import (
    ALL_THREE,
    PrescribedModel,
    backward,
    data_mesh,
    gradient_of,
    shard_prescribed,
    zero_config,
)
from zeropp import InputError, Sharding, optimizer_step, shard

SHAPES = [[(102, 96), (51,), (7, 5), (64, 33)], [(33, 20), (1, 257), (9,)], [(130, 9)]]
FLAT = [shape for unit in SHAPES for shape in unit]
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
EXACT = 1e-6  # relative to the tensor's norm: sums of 4 fp32 terms in another order
# INT8 then INT4 on Gaussian gradients is 0.118, and INT8 twice, where rows are no multiple of 32,
# is 0.01; a tensor of a few blocks may be a little farther off.
QUANTIZED_ERROR = 0.15


def mean_of(seeds: Sequence[int], index: int) -> torch.Tensor:
    """The mean over all ranks of the sum of a weight's gradients over micro-batches."""
    world = range(dist.get_world_size())
    return sum(prescribed_gradient(seed, rank, index) for seed in seeds for rank in world) / len(
        world
    )


def prescribed_gradient(seed: int, rank: int, index: int) -> torch.Tensor:
    return gradient_of(100 * seed + rank, index, FLAT[index])


def one_pass(sharding: Sharding, seed: int, absent: Sequence[int], *, last: bool = True) -> None:
    """A micro-batch in which the weights at `absent` get no gradient, on any rank."""
    rank = dist.get_rank()
    mine = [None if i in absent else prescribed_gradient(seed, rank, i) for i in range(len(FLAT))]
    backward(sharding, mine, last=last)


def check(weight: nn.Parameter, expected: torch.Tensor, worst: float) -> None:
    assert type(weight.grad._local_tensor) is torch.Tensor  # of no reduction that is under way
    actual = weight.grad.full_tensor().float()
    error = (actual - expected).norm() / expected.norm()
    assert error <= worst, (tuple(expected.shape), error.item())


def worst_of(zero: dict, index: int) -> float:
    travels_as_it_is = len(FLAT[index]) < 2 or "zero_quantized_gradients" not in zero
    return EXACT if travels_as_it_is else QUANTIZED_ERROR


ZEROS = [{"stage": stage} | extra for stage in (1, 2, 3) for extra in ({}, QUANTIZED)]
ZEROS += [ALL_THREE]


@pytest.mark.parametrize("zero", ZEROS, ids=str)
@ranks(4)
def test_parameters_without_a_gradient_do_not_shift_others(zero):
    """FSDP2: only parameters that have a gradient are in the buffer that is reduced.

    The micro-batches of a step add up, and may leave out different parameters. What is left of one
    step is not in the next.
    """
    sharding = shard_prescribed(SHAPES, zero_config(zero, 2))
    steps = [[()], [(0,)], [(1, 2, 4)], [(7,)], [(0, 1, 2, 3)], 2 * [(1, 3), (0,), (3,)]]
    for step in steps:
        for seed, absent in enumerate(step):
            one_pass(sharding, seed, absent, last=seed == len(step) - 1)
        for index, weight in enumerate(sharding.model.parameters()):
            seeds = [seed for seed, absent in enumerate(step) if index not in absent]
            if seeds:
                check(weight, mean_of(seeds, index), worst_of(zero, index))
            else:
                assert weight.grad is None
            weight.grad = None


@pytest.mark.parametrize("zero", [{"stage": 3}, {"stage": 2} | QUANTIZED, ALL_THREE], ids=str)
@ranks(4)
def test_frozen_parameters_inside_a_unit(zero):
    torch.manual_seed(0)
    model, frozen = PrescribedModel(SHAPES), (0, 1, 6)
    for index, weight in enumerate(model.parameters()):
        weight.requires_grad_(index not in frozen)
    sharding = shard(model, data_mesh(), zero_config(zero, 2))
    for _ in range(2):
        one_pass(sharding, 3, frozen)
        for index, weight in enumerate(model.parameters()):
            if index in frozen:
                assert weight.grad is None
            else:
                check(weight, mean_of([3], index), worst_of(zero, index))
            weight.grad = None
        assert sharding.traffic.take() == sharding.expected_traffic()
        sharding.weights_changed()


@pytest.mark.parametrize(
    ("zero", "dtype"),
    [({"stage": 3}, torch.bfloat16), ({"stage": 3}, torch.float64),
     ({"stage": 1} | QUANTIZED, torch.float16), (ALL_THREE, torch.bfloat16),
     (ALL_THREE, torch.float64)],
    ids=str,
)  # fmt: skip
@ranks(4)
def test_parameters_of_other_types_get_the_same_mean(zero, dtype):
    """FSDP2: reduced gradients are cast to the parameter's type, right after the collective."""
    torch.manual_seed(0)
    sharding = shard(PrescribedModel(SHAPES).to(dtype), data_mesh(), zero_config(zero, 2))
    for seed in (1, 2):
        one_pass(sharding, seed, (), last=seed == 2)
    for index, weight in enumerate(sharding.model.parameters()):
        assert weight.grad.dtype == dtype
        rounding = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 0
        check(weight, mean_of([1, 2], index), worst_of(zero, index) + rounding)


@pytest.mark.parametrize(
    ("zero", "per_node"), [({"stage": 3}, 2), ({"stage": 3}, 4), (ALL_THREE, 2)]
)
@ranks(4)
def test_hooks_that_read_a_gradient_when_it_is_accumulated_and_an_earlier_one(zero, per_node):
    """An optimizer may step each parameter when its gradient has been accumulated."""
    sharding = shard_prescribed(SHAPES, zero_config(zero, per_node))
    weights, gradients, earlier = list(sharding.model.parameters()), {}, []
    sharding.model.units[0].register_full_backward_hook(
        lambda *_: earlier.append(weights[-1].grad.to_local().clone())
    )
    for index, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(
            lambda weight, index=index: gradients.update({index: weight.grad.to_local().clone()})
        )
    one_pass(sharding, 5, ())
    assert set(gradients) == set(range(len(FLAT)))
    assert len(earlier) == 1 and torch.equal(earlier[0], weights[-1].grad.to_local())
    for index, weight in enumerate(weights):
        assert torch.equal(gradients[index], weight.grad.to_local())
        check(weight, mean_of([5], index), worst_of(zero, index))


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
@ranks(4)
def test_a_mean_of_large_fp16_gradients_does_not_overflow(ranks_per_node):
    """FSDP2: fp16 divides before and after the sum, as 4 times 6e4 is no fp16 number."""
    for zero in ({"stage": 3}, {"stage": 1}, ALL_THREE):
        config = zero_config(zero, ranks_per_node, fp16={"enabled": True})
        sharding = shard_prescribed([[(8, 64), (4,)]], config)
        backward(sharding, [torch.full((8, 64), 4e4), torch.full((4,), 6e4)])
        for weight, value in zip(sharding.model.parameters(), (4e4, 6e4), strict=True):
            whole = weight.grad.full_tensor()
            torch.testing.assert_close(whole, torch.full_like(whole, value), rtol=0.01, atol=0)


@ranks(2)
def test_an_optimizer_made_before_sharding_is_told_to_be_made_after():
    """FSDP2: an optimizer built before `fully_shard` silently trains nothing."""
    torch.manual_seed(0)
    model = PrescribedModel(SHAPES)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    sharding = shard(model, data_mesh(), zero_config({"stage": 3}))
    one_pass(sharding, 1, ())
    with pytest.raises(InputError, match="make the optimizer after zeropp.shard"):
        optimizer_step(early, sharding)
    before = [weight.full_tensor() for weight in model.parameters()]
    optimizer_step(torch.optim.SGD(model.parameters(), lr=1.0), sharding)
    for weight, old in zip(model.parameters(), before, strict=True):
        assert isinstance(weight, DTensor) and not torch.equal(weight.full_tensor(), old)
