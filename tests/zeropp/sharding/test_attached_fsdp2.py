"""What FSDP2 promises holds as well for models that are attached with nothing quantized.

Each subject runs on plain FSDP2 and attached, and yields what must be the same. On two ranks that
is every bit: a sum of two numbers does not depend on their order, and halving it is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import zeropp
from tests.ranks import ranks
from tests.zeropp.small_model import Block, small_model

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 1}}
QUANTIZED = PLAIN | {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
BF16 = torch.bfloat16
Prepare = Callable[[nn.Module], None]


def sharded(model: nn.Module, prepare: Prepare, **options: Any) -> FSDPModule:
    mesh = init_device_mesh("cpu", (2,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, **options)
    prepare(model)
    return model


def inputs(number: int, width: int = 12) -> Tensor:
    """Of this rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(3, width, generator=generator)


def tokens(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randint(0, 37, (2, 5), generator=generator)


def gradients(model: nn.Module) -> Iterator[Tensor | None]:
    for weight in model.parameters():
        gradient = weight.grad
        yield gradient.to_local().clone() if isinstance(gradient, DTensor) else gradient


def mixed_precision(prepare: Prepare, *, policy: MixedPrecisionPolicy) -> Iterator[Any]:
    model, mesh = small_model(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    prepare(fully_shard(model, mesh=mesh, mp_policy=replace(policy, output_dtype=torch.float32)))
    for number in range(2):
        output = model(tokens(number))
        yield output.dtype, output.detach()
        output.square().sum().backward()
        yield from gradients(model)
        model.zero_grad()


def scaled(prepare: Prepare) -> Iterator[Any]:
    """With one step in which the gradients of one rank overflow."""
    model = sharded(small_model(), prepare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for number in range(3):
        loss = model(tokens(number)).square().mean()
        if number == 1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield scaler.get_scale()
        yield from (weight.to_local().clone() for weight in model.parameters())


def states(prepare: Prepare) -> Iterator[Any]:
    """Saved as shards and whole, loaded into another model of other weights, which then trains."""
    model, other = (sharded(small_model(), prepare) for _ in range(2))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other)]
    step(model, optimizers[0], 0)
    for name, value in model.state_dict().items():
        yield name, value.placements, value.to_local().clone()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    yield from get_model_state_dict(model, options=whole).items()
    step(other, optimizers[1], 1)
    saved = get_state_dict(model, optimizers[0], options=StateDictOptions(full_state_dict=True))
    set_state_dict(
        other, optimizers[1], model_state_dict=saved[0], optim_state_dict=saved[1],
        options=StateDictOptions(full_state_dict=True),
    )  # fmt: skip
    step(other, optimizers[1], 2)
    yield from (weight.to_local().clone() for weight in other.parameters())
    other.load_state_dict(model.state_dict())
    yield other(tokens(3)).detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(tokens(number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Outputs(nn.Module):
    """Uses a block twice and none of another, and has outputs of which some are not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.heads = nn.ModuleDict({name: nn.Linear(12, 3) for name in ("used", "left")})

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.blocks[1](self.blocks[0](self.blocks[1](x)))
        return {name: (head(x), None, "text") for name, head in self.heads.items()}


def autograd(prepare: Prepare) -> Iterator[Any]:
    """Gradients of inputs, several passes before a backward, and a graph that is kept."""
    model = sharded(Outputs(), prepare)
    x = inputs(0).requires_grad_()
    model(x)["used"][0].sum().backward()
    yield x.grad
    yield from gradients(model)
    outputs = [model(inputs(number)) for number in range(2)]
    sum(output["used"][0].square().sum() for output in outputs).backward()
    yield from gradients(model)
    model.set_requires_gradient_sync(False)
    model(x)["left"][0].sum().backward()
    model.set_requires_gradient_sync(True)
    loss = model(x)["used"][0].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    yield from gradients(model)


def nested(prepare: Prepare) -> Iterator[Any]:
    """Units within units, some of which stay gathered, and one with no parameters of its own."""
    model, mesh = Outputs(), init_device_mesh("cpu", (2,))
    fully_shard(model.blocks[1].up, mesh=mesh)
    for unit in (*model.blocks, [model.heads["used"], model.heads["left"]]):
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is model.blocks[0])
    prepare(fully_shard(model, mesh=mesh))
    for number in range(2):
        heads = model(inputs(number))
        (heads["used"][0].sum() + heads["left"][0].square().sum()).backward()
        yield from gradients(model)


def alone(prepare: Prepare) -> Iterator[Any]:
    """Units that run without their root, one of them before and after others that follow it."""
    model = sharded(small_model(3), prepare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (1, 0, 2, 1):
        output = model.blocks[number](inputs(number))
        output.square().sum().backward()
        yield output.detach()
        yield from gradients(model)
        optimizer.step()


class HalvedOnTheWire(Tensor):
    """A weight that says itself that it is gathered in bf16."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "HalvedOnTheWire":
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda each: each.values, (args, kwargs or {}))
        result = func(*args, **kwargs)
        kept = ("split", "new_zeros", "slice", "copy_", "view", "detach", "clone", "as_strided")
        if func._schema.name.removeprefix("aten::") in kept:
            return pytree.tree_map_only(Tensor, cls, result)
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        return (self.values.to(BF16),), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (whole,) = gathered
        if out is None:
            values = whole.to(dtype)
            return values, (values,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def with_gather_hooks(prepare: Prepare) -> FSDPModule:
    model = small_model()
    for block in model.blocks[:2]:
        block.down.weight = nn.Parameter(HalvedOnTheWire(block.down.weight.detach()))
    return sharded(model, prepare)


def extended(prepare: Prepare) -> Iterator[Any]:
    model = with_gather_hooks(prepare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, optimizer, number)
        yield model(tokens(number)).detach()


def ignored(prepare: Prepare) -> Iterator[Any]:
    """Parameters that stay whole, whose gradients nobody reduces."""
    model = small_model()
    left = {model.blocks[1].up.weight, model.embedding.weight}
    sharded(model, prepare, ignored_params=left)
    assert not any(isinstance(each, DTensor) for each in left)
    for number in range(2):
        model(tokens(number)).square().sum().backward()
        yield from gradients(model)


class Adapted(nn.Module):
    """A block in bf16 with an adapter in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12, dtype=BF16).requires_grad_(False)
        self.adapter = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(BF16)).float() + self.adapter(x)


def adapted(prepare: Prepare) -> FSDPModule:
    torch.manual_seed(4)
    return sharded(Chain(Adapted(), Adapted()), prepare)


class Chain(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def adapters(prepare: Prepare) -> Iterator[Any]:
    """Units of several types, whose trained ones are not the first."""
    model = adapted(prepare)
    for number in range(2):
        output = model(inputs(number))
        yield output.detach()
        output.square().mean().backward()
        yield from gradients(model)
        model.zero_grad()


def pipelined(prepare: Prepare) -> Iterator[Any]:
    """A stage of a pipeline reduces its gradients after the last backward pass of a step."""
    torch.manual_seed(4)
    model = sharded(Chain(Block(), Block()), prepare)
    group = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pipeline", "data"))["pipeline"]
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=group.get_group())
    schedule = Schedule1F1B(stage, n_microbatches=3, loss_fn=lambda x, target: (x - target).sum())
    for number in range(2):
        losses = []
        schedule.step(inputs(number), target=inputs(9), losses=losses)
        yield losses
        yield from gradients(model)
        model.zero_grad()


POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "inputs not cast": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False
    ),
}
SUBJECTS = {
    subject.__name__: subject
    for subject in (scaled, states, autograd, nested, alone, extended, ignored)
} | {name: partial(mixed_precision, policy=policy) for name, policy in POLICIES.items()}
SUBJECTS |= {"adapters": adapters, "pipelined": pipelined}


def attach(model: nn.Module) -> None:
    zeropp.attach(model, PLAIN)


@pytest.mark.parametrize("name", SUBJECTS)
@ranks(2)
def test_nothing_quantized_it_is_what_fsdp2_makes_of_it(name):
    expected = [*SUBJECTS[name](lambda model: None)]
    values = [*SUBJECTS[name](attach)]
    assert len(values) == len(expected) > 2
    for value, other in zip(values, expected, strict=True):
        for mine, its in zip(*(pytree.tree_leaves(each) for each in (value, other)), strict=True):
            assert torch.equal(mine, its) if isinstance(its, Tensor) else mine == its, name


@ranks(2)
def test_gradients_that_are_reduced_in_bf16_are_rounded_once_less():
    """FSDP2 rounds the sum of two terms to bf16, by at most 2**-8 of it; attached it is fp32."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    expected = [*mixed_precision(lambda model: None, policy=policy)]
    for value, other in zip(mixed_precision(attach, policy=policy), expected, strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(value, other, rtol=1.01 * 2.0**-8, atol=0)


@ranks(2)
def test_units_with_gather_hooks_keep_their_gathers_where_weights_are_quantized():
    attached = []
    model = with_gather_hooks(lambda model: attached.append(zeropp.attach(model, QUANTIZED)))
    assert list(attached[0].skipped) == ["blocks.0", "blocks.1"]
    assert "fsdp_pre_all_gather" in attached[0].skipped["blocks.0"]
    block, whole = model.blocks[0], small_model().blocks[0]
    block.unshard()
    assert torch.equal(block.down.weight, whole.down.weight.to(BF16).float())
    assert torch.equal(block.up.weight, whole.up.weight)
    model(tokens(1)).sum().backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


@ranks(2)
def test_weights_of_several_types_are_sent_as_they_are_and_not_quantized():
    attached = []
    with pytest.raises(zeropp.InputError, match="float32, and only those of one type can be quan"):
        adapted(lambda model: zeropp.attach(model, QUANTIZED))
    model = adapted(lambda model: attached.append(zeropp.attach(model, PLAIN)))
    model(inputs(1)).sum().backward()
    assert attached[0].traffic.take() == attached[0].expected_traffic()
