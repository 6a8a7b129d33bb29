"""Four ranks on one GPU, over gloo: the collectives give the CPU's bits, on FSDP2's streams.

What a GPU adds to the tests of the collectives on CPUs: kernels, streams, and memory that is given
to others while a stream still reads it.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.gpu import GPU, MARKS
from tests.ranks import ranks
from tests.zeropp.failed_passes import GOES_ON
from tests.zeropp.prescribed_gradients import (
    ALL_THREE,
    PrescribedModel,
    backward,
    data_mesh,
    gradient_of,
    zero_config,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, optimizer_step, shard
from zeropp.wire.collectives import WeightGather
from zeropp.wire.cross_stream import CrossStreamTensor

pytestmark = MARKS
SHAPES = [[(130, 67), (300,), (41, 9)], [(3, 5, 3, 3), (1, 700), (7,), (513, 2)]]
FLAT = [shape for unit in SHAPES for shape in unit]
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
ZERO = {
    "nothing quantized": {"stage": 3},
    "weights": {"stage": 3} | QWZ,
    "weights, one copy in each node": {"stage": 3, "zero_hpz_partition_size": 2} | QWZ,
    "gradients, stage 1": {"stage": 1} | QGZ,
    "all three": ALL_THREE,
}
PRODUCTS = ("gemm", "nvjet", "cutlass", "gemv")  # in the names of cuBLAS's kernels
LATE = 50  # products of 4096 x 4096
LATE_CYCLES = 20_000_000  # about ten milliseconds
GATHER = WeightGather.__call__
FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}}


def gathered_weights_and_means(device: str, zero: dict, settings: dict) -> list[torch.Tensor]:
    """The weights every unit computes with in two micro-batches, then the averaged gradients."""
    torch.manual_seed(0)
    model, gathered = PrescribedModel(SHAPES).to(device), []
    sharding = shard(model, data_mesh(device), zero_config(zero, 2, **settings))
    for unit in model.units:
        unit.register_forward_pre_hook(
            lambda unit, _: gathered.extend(weight.detach().clone() for weight in unit.weights)
        )
    dtype = sharding.compute_dtype
    for number in range(2):
        mine = [gradient_of(dist.get_rank() + 4 * number, i, s) for i, s in enumerate(FLAT)]
        backward(sharding, [gradient.to(device, dtype) for gradient in mine], last=number == 1)
    means = [weight.grad.to_local() for weight in model.parameters()]
    return [mean.cpu() for mean in (*gathered, *means)]


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
@ranks(4, ranks_per_node=2)
def test_weights_and_gradients_are_those_of_the_cpu_to_the_last_bit(zero, settings):
    for actual, expected in zip(
        gathered_weights_and_means(GPU, zero, settings),
        gathered_weights_and_means("cpu", zero, settings),
        strict=True,
    ):
        assert torch.equal(actual, expected)


def trained(
    device: str, zero: dict, steps: int, after: Callable[[], None] | None = None, **settings: dict
) -> list[float]:
    """This rank's losses over steps of two micro-batches; `after` is called behind every unit."""
    sharding = shard(small_model(3).to(device), data_mesh(device), zero_config(zero, 2, **settings))
    if after:
        for unit in sharding.units:
            unit.register_forward_hook(lambda *_: after())
            unit.register_full_backward_hook(lambda *_: after())
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(steps):
        for index in range(2):
            tokens = tokens_of(2 * step + index).to(device).chunk(4)[dist.get_rank()]
            with sharding.micro_step(last=index == 1):
                loss = loss_of(sharding.model, tokens)
                (loss / 2).backward()
            losses.append(loss.detach())
        optimizer_step(optimizer, sharding, clip_grad=0.5)
    return torch.stack(losses).tolist()


@ranks(4, ranks_per_node=2)
def test_training_follows_the_cpu():
    """fp32 sums in another order: 1e-4 after 10 steps; codes that flip move the loss by more."""
    plain = {"stage": 3, "zero_hpz_partition_size": 2}
    assert trained(GPU, plain, 10) == pytest.approx(trained("cpu", plain, 10), rel=1e-4)
    assert trained(GPU, ALL_THREE, 10) == pytest.approx(trained("cpu", ALL_THREE, 10), rel=3e-2)


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}])
@ranks(4, ranks_per_node=2)
def test_waiting_for_the_device_behind_every_unit_changes_no_bit(settings):
    """No buffer is read too early or given to others too soon: with waits nothing can be."""
    hurried = trained(GPU, ALL_THREE, 20, **settings)
    assert hurried == trained(GPU, ALL_THREE, 20, torch.cuda.synchronize, **settings)


@ranks(4, ranks_per_node=2)
def test_a_copy_gathered_on_one_stream_is_read_on_another():
    """`unshard` called by hand gathers on the current stream, backward on a stream of FSDP2's."""
    sharding = shard(Wide().to(GPU), data_mesh(GPU), zero_config(ALL_THREE, 2))
    x = torch.ones(4, 1024, device=GPU)
    losses = [step_of(sharding, x)]  # FSDP2 makes its streams
    for block in sharding.model.blocks:
        block.unshard()
        block.reshard()
    busy = torch.ones(4096, 4096, device=GPU)
    for _ in range(LATE):
        busy = busy @ busy * 1e-4  # the current stream is late
    losses += [step_of(sharding, x) for _ in range(2)]
    assert losses[0] == losses[1] == losses[2]


@ranks(4, ranks_per_node=2)
def test_written_weights_are_seen_and_the_host_waits_for_no_computation():
    sharding = shard(small_model(3).to(GPU), data_mesh(GPU), zero_config(ALL_THREE, 2))
    losses, tokens = [], tokens_of(1).to(GPU)
    for notifies in (True, False):
        for weight in sharding.model.parameters():
            with torch.no_grad():
                weight.fill_(0.01)
                losses.append(loss_of(sharding.model, tokens).item())
                weight.mul_(2.0)
            if notifies:
                sharding.weights_changed()
        with torch.no_grad():
            losses.append(loss_of(sharding.model, tokens).item())
    assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]
    torch.cuda._sleep(100 * LATE_CYCLES)  # about a second
    computed = torch.cuda.current_stream().record_event()
    sharding.roots[0].kept.drop_written()
    assert not computed.query()
    torch.cuda.synchronize()


def write_late(
    self: WeightGather, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, group, async_op
) -> dist.Work | None:
    """A gather whose result arrives after some milliseconds, on the stream that it runs on."""
    work = GATHER(self, output_tensor, input_tensor, group, async_op)
    gathered = output_tensor.clone()
    torch.cuda._sleep(LATE_CYCLES)
    output_tensor.copy_(gathered)
    return work


@ranks(2)
def test_a_dropped_gather_writes_to_memory_of_no_later_one():
    """It was begun for a block that was not used, and its memory is wanted while it arrives."""

    def gradients(gather: Callable) -> list[torch.Tensor]:
        model = Wide().to(GPU)
        sharding = shard(model, data_mesh(GPU), zero_config({"stage": 3}))
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
        x = torch.ones(4, 1024, device=GPU)
        step_of(sharding, x)  # FSDP2 makes its streams
        model.zero_grad()
        model.order = (0, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightGather, "__call__", gather)
            loss = model(x)
        sharding.release()
        loss.backward()
        return [weight.grad.to_local() for weight in model.blocks[:2].parameters()]

    for late, expected in zip(gradients(write_late), gradients(GATHER), strict=True):
        assert torch.equal(late, expected)


@GOES_ON
@ranks(2)
def test_gathers_after_an_exception_in_forward_wait_for_the_optimizer():
    """FSDP2 makes its streams wait where a forward pass begins, not where one goes on."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    def loss(*, waits: bool) -> float:
        model = Wide().to(GPU)
        sharding = shard(model, data_mesh(GPU), zero_config({"stage": 3}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.ones(4, 1024, device=GPU)
        with sharding.micro_step(last=True):
            model(x).backward()
        hook = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(x)
        hook.remove()
        torch.cuda._sleep(LATE_CYCLES)  # the optimizer is late
        optimizer.step()
        if waits:
            torch.cuda.synchronize()
        return model(x).item()

    assert loss(waits=False) == loss(waits=True)


class Wide(nn.Module):
    """Layers whose products are kernels of their own name; `order` says which are used."""

    order = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x.square().mean()


def step_of(sharding: Sharding, x: torch.Tensor) -> float:
    """The loss, and copies that are dropped while the device may still be at it."""
    with sharding.micro_step(last=False):
        loss = sharding.model(x)
        loss.backward()
    sharding.weights_changed()
    torch.empty(1 << 26, device=GPU).fill_(float("nan"))  # whoever takes freed memory too soon
    return loss.item()


@ranks(2, ranks_per_node=1)
def test_kernels_run_on_other_streams_than_products():
    """So the next gather and the last reduction can overlap with computation."""
    model = shard(Wide().to(GPU), data_mesh(GPU), zero_config({"stage": 3} | QWZ | QGZ, 1))
    x = torch.ones(4, 1024, device=GPU)
    step_of(model, x)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step_of(model, x)
        torch.cuda.synchronize()
    of_ours, of_products = set(), set()
    for event in profiled.profiler.kineto_results.events():
        if "_rows" in event.name():
            of_ours.add(event.device_resource_id())
        elif any(name in event.name() for name in PRODUCTS):
            of_products.add(event.device_resource_id())
    assert of_ours and of_products and not of_ours & of_products


@ranks(2)
def test_another_order_of_gradients_is_told_in_the_next_pass():
    """The host has gone on before the ranks' notes arrive."""
    sharding = shard(Wide().to(GPU), data_mesh(GPU), zero_config({"stage": 1}))
    x = torch.ones(4, 1024, device=GPU)
    step_of(sharding, x)  # gathers all blocks, which stay so
    sharding.model.order = (0, 1, 2) if dist.get_rank() else (2, 1, 0)
    with sharding.micro_step(last=True):
        sharding.model(x).backward()
    with (
        sharding.micro_step(last=True),
        pytest.raises(InputError, match="different units in the last pass"),
    ):
        sharding.model(x).backward()


@ranks(2)
def test_passes_are_not_captured():
    sharding = shard(Wide().to(GPU), data_mesh(GPU), zero_config({"stage": 1}))
    x = torch.ones(4, 1024, device=GPU)
    step_of(sharding, x)
    with (
        pytest.raises(InputError, match="capture no passes"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
    ):
        sharding.roots[0].use.note(sharding.units[0], [], [])
    torch.cuda.synchronize()


def test_rows_are_written_in_place_after_they_are_read():
    """A reader that is late by milliseconds sees what was there before, on another stream."""
    rows = torch.zeros(1 << 20, device=GPU)
    shared = CrossStreamTensor(rows)
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(LATE_CYCLES)
        read = shared.on_current_stream().clone()
        shared.note_read()
    with torch.cuda.stream(writer):
        shared.for_writing().fill_(1.0)
    torch.cuda.synchronize()
    assert not read.any() and rows.all()
