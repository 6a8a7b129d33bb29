"""Ranks that use different parameters: gradients equal those of one process, or an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from zeropp import InputError, Sharding, initialize, optimizer_step, shard
from zeropp import fsdp_adapter as fsdp
from zeropp.wire.gradients import GradientUse

WIDTH, NUM_EXPERTS = 6, 3
NEAR = 2e-5  # of the largest element: sums of a few fp32 terms in another order
BF16 = 2**-7  # of the largest element: two roundings to 8 bits in forward, two in backward
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


class Block(nn.Module):
    """Experts of one shape, of which a pass uses one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + self.experts[expert](x).tanh()


class Experts(nn.Module):
    """Two blocks of experts, and a layer that a pass may drop."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: torch.Tensor, expert: int, *, drop_first: bool) -> torch.Tensor:
        if not drop_first:
            x = self.first(x)
        for block in self.blocks:
            x = block(x, expert)
        return x.float().square().mean()


def choices(rank: int, micro_batch: int, width: int) -> tuple[torch.Tensor, int, bool]:
    """The input, the expert and whether the first layer is dropped; nobody uses expert 2."""
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(4, width, generator=generator), (rank + micro_batch) % 2, rank == 1


def run_pass(model: nn.Module, rank: int, micro_batch: int, width: int = WIDTH) -> torch.Tensor:
    x, expert, drop_first = choices(rank, micro_batch, width)
    return model(x, expert, drop_first=drop_first)


def expected_gradients(micro_batches: int, width: int = WIDTH) -> dict[str, torch.Tensor | None]:
    """The gradients of one process that runs the micro-batches of all ranks."""
    model, world = Experts(width), dist.get_world_size()
    for rank in range(world):
        for index in range(micro_batches):
            run_pass(model, rank, index, width).div(world).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def require_equal(sharding: Sharding, expected: dict, tolerance: float) -> None:
    for name, parameter in sharding.model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
            continue
        error = (parameter.grad.full_tensor() - expected[name]).abs().max()
        assert error <= tolerance * expected[name].abs().max(), (name, error)


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(1)
def test_one_rank_may_use_a_parameter_in_a_later_micro_batch_only(stage: int):
    require_own_experts(stage, "bf16", micro_batches=2)


def require_own_experts(stage: int, precision: str, micro_batches: int) -> None:
    settings = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    per_node = min(2, dist.get_world_size())
    sharding = shard(Experts(), data_mesh(), zero_config({"stage": stage}, per_node, **settings))
    for index in range(micro_batches):
        with sharding.micro_step(last=index == micro_batches - 1):
            run_pass(sharding.model, dist.get_rank(), index).backward()
    require_equal(sharding, expected_gradients(micro_batches), BF16 if settings else NEAR)


@ranks(4)
def test_quantized_gradients_are_those_of_the_right_experts():
    """Within five deviations.

    A scale is 1/7 of the largest rotated value, which is about three times the root mean square of
    the block. Errors, spread evenly over a scale, have a deviation of 3 / 7 / sqrt(12) = 0.12 of
    that mean, which is less than half of the largest element.
    """
    config = zero_config({"stage": 3, "zero_hpz_partition_size": 2} | QUANTIZED, 2)
    sharding = shard(Experts(32), data_mesh(), config)
    with sharding.micro_step(last=True):
        run_pass(sharding.model, dist.get_rank(), 0, 32).backward()
    require_equal(sharding, expected_gradients(1, 32), 0.3)


class Uneven(nn.Module):
    """Two blocks without an order, of which a rank runs those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


@ranks(2)
def test_ranks_that_reduce_units_in_another_order_are_told():
    """The gathers of stage 1 happen once, in the same order; then the ranks run apart."""
    sharding = shard(Uneven(), data_mesh(), zero_config({"stage": 1}, 2))
    x, order = torch.ones(2, WIDTH), (0, 1) if dist.get_rank() else (1, 0)
    with sharding.micro_step(last=False):
        sharding.model(x, (0, 1)).backward()
    with (
        sharding.micro_step(last=True),
        pytest.raises(InputError, match=r"this rank: blocks\.\d, blocks\.\d\. All ranks must run"),
    ):
        sharding.model(x, order).backward()


class HostOnly:
    """Stands in for a GPU: what would be pinned and sent to it stays where it is."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        to = torch.Tensor.to
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "to", lambda tensor, *where, **options: (
            tensor if where[:1] == (self.device,) else to(tensor, *where, **options)
        ))  # fmt: skip

    device = torch.device("cuda")


@pytest.mark.parametrize("found_by", ["pass", "step", "save"])
@ranks(2)
def test_on_a_gpu_another_order_is_told_later_on_all_ranks(found_by: str):
    """By whichever comes first: the next pass, a step for which the host waits, or a save."""
    sharding = shard(Uneven(), data_mesh(), zero_config({"stage": 1}, 2))
    x, order = torch.ones(2, WIDTH), (0, 1) if dist.get_rank() else (1, 0)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    before = [weight.to_local().clone() for weight in sharding.model.parameters()]
    with sharding.micro_step(last=False):
        sharding.model(x, (0, 1)).backward()
    with pytest.MonkeyPatch.context() as patch:
        sharding.roots[0].use._device = HostOnly(patch).device
        with sharding.micro_step(last=True):
            sharding.model(x, order).backward()
        with pytest.raises(
            InputError, match=r"different units in the last pass .*blocks\.\d\. All"
        ):
            if found_by == "step":
                optimizer_step(optimizer, sharding)
            elif found_by == "save":
                sharding.require_same_order()
            else:
                with sharding.micro_step(last=True):
                    sharding.model(x, (0, 1)).backward()
        sharding.discard_gradients()
        for _ in range(2):  # the error is told once, and the same order raises none
            with sharding.micro_step(last=True):
                sharding.model(x, (0, 1)).backward()
            for weight, old in zip(sharding.model.parameters(), before, strict=True):
                assert torch.equal(weight.to_local(), old)
            sharding.require_same_order()


@ranks(2)
def test_on_a_gpu_a_rank_with_unused_weights_is_told_as_late_as_the_others():
    """It waits for the notes, to drop the zeros that all ranks sent; the others go on."""
    sharding = shard(Experts(), data_mesh(), zero_config({"stage": 1}, 2))
    x = torch.ones(2, WIDTH)
    with sharding.micro_step(last=False):
        sharding.model(x, 0, drop_first=False).backward()
    use = sharding.roots[0].use
    with pytest.MonkeyPatch.context() as patch:
        use._device = HostOnly(patch).device
        with sharding.micro_step(last=True):
            loss = sharding.model(x, 0, drop_first=False)
            if dist.get_rank():  # as if it had reduced the blocks in another order
                patch.setattr(use, "_begin", {unit: -at for unit, at in use._begin.items()})
            loss.backward()
        assert sharding.model.blocks[0].experts[1].weight.grad is None
        with pytest.raises(InputError, match="different units in the last pass"):
            sharding.require_same_order()


@pytest.mark.parametrize("micro_batches", [1, 2])
@ranks(4)
def test_offloaded_gradients_are_those_of_the_right_experts(micro_batches: int):
    """Also with weight decay, which must not act on the expert that nobody uses."""
    json = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    }
    model, world = Experts(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    engine, *_ = initialize(model=Experts(), config=json)
    for _ in range(2):
        for index in range(micro_batches):
            for rank in range(world):
                run_pass(model, rank, index).div(world * micro_batches).backward()
            engine.backward(run_pass(engine, dist.get_rank(), index))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for (name, weight), expected in zip(
        engine.module.named_parameters(), model.parameters(), strict=True
    ):
        error = (weight - expected).abs().max()
        assert error <= NEAR * expected.abs().max(), (name, error)


def test_the_host_does_not_wait_for_a_gpu_to_compare(monkeypatch):
    """A copy from pageable memory would wait for all that was queued before it."""
    copies = []

    def record(tensor: torch.Tensor, device: torch.device, **options: bool) -> torch.Tensor:
        copies.append((device.type, pinned[-1] is tensor, options))
        return tensor

    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", record)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(fsdp, "after_backward", lambda *_: None)
    monkeypatch.setattr(fsdp, "own_specs", lambda unit: (None,))
    use, unit = GradientUse([None], torch.device("cuda")), nn.Linear(1, 1)
    use.add(unit)
    use.note(unit, [0], [0])
    use._compare()
    assert copies == [("cuda", True, {"non_blocking": True})]
