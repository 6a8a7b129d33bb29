"""ZeRO-Offload with a GPU: the losses of Adam on the GPU, and copies that wait for each other."""

import pytest
import torch

from tests.gpu import GPU, MARKS
from tests.ranks import ranks
from tests.zeropp.failed_passes import GOES_ON
from tests.zeropp.optim.test_delayed_update import STEPS
from tests.zeropp.optim.test_offload import (
    ADAM,
    FORMATS,
    ON_HOST,
    offloaded,
    plain,
    sharded,
    trained,
)
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, tokens_of
from zeropp import optimizer_step
from zeropp.capabilities.offload.host_masters import HOST, Offload
from zeropp.capabilities.offload.offloaded_adam import DelayedAdam

pytestmark = MARKS
LATE_CYCLES = 5_000_000  # some milliseconds: longer than a reduction of the small model


def on_gpu(sharding):
    return offloaded(sharding, device=GPU)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2}, {"stage": 3}, ALL_THREE, ON_HOST])
@ranks(4, ranks_per_node=2)
def test_losses_are_those_of_adam_on_the_gpu(zero, settings):
    """The norm is summed in another order on the host: 1e-6 in the factor of clipping."""
    without = {key: zero[key] for key in zero if not key.startswith("offload")}
    expected = trained(plain, without, settings, steps=10, device=GPU)
    assert trained(on_gpu, zero, settings, steps=10, device=GPU) == pytest.approx(
        expected, rel=1e-3 if settings or zero == ALL_THREE else 1e-5
    )


@pytest.mark.parametrize("ratio", [0.0, 0.4])
@ranks(1)
def test_a_ratio_keeps_part_of_the_weights_on_the_gpu(ratio):
    bf16 = FORMATS["bf16"]
    expected = trained(on_gpu, {"stage": 2}, bf16, steps=10, device=GPU)
    losses = trained(
        lambda sharding: offloaded(sharding, ratio, GPU), {"stage": 2}, bf16, steps=10, device=GPU
    )
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("zero", [{"stage": 2}, ON_HOST])
@ranks(1)
def test_devices_of_weights_masters_and_gradients(zero):
    sharding = sharded(zero, FORMATS["bf16"], GPU)
    optimizer = on_gpu(sharding)
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0).to(GPU)).backward()
    optimizer.await_gradients()
    for own, master in optimizer.masters.items():
        assert own.device.type == ("cpu" if zero == ON_HOST else "cuda")
        local = master.to_local()
        assert local.device == HOST and not local.is_pinned()  # it is not sent
        assert master.grad.to_local().is_pinned()


@ranks(1)
def test_synchronizing_everywhere_changes_no_bit():
    expected = trained(on_gpu, {"stage": 3}, FORMATS["bf16"], steps=20, device=GPU)

    def synchronizing_optimizer(sharding):
        for unit in sharding.units:
            unit.register_full_backward_hook(lambda *_: torch.cuda.synchronize())
        return on_gpu(sharding)

    assert expected == trained(
        synchronizing_optimizer, {"stage": 3}, FORMATS["bf16"], steps=20, device=GPU
    )


@pytest.mark.parametrize("ratio", [0.0, 0.4])
@ranks(4, ranks_per_node=2)
def test_memory_of_means_is_not_given_to_the_next_reduction_too_soon(ratio):
    """The stream that copies the means is late, and the next reduction wants their memory."""

    def losses(*, late: bool) -> list[float]:
        def make(sharding):
            return offloaded(sharding, ratio, GPU)

        def take_late(offload, *arguments) -> None:
            if late:
                torch.cuda._sleep(LATE_CYCLES)
            original(offload, *arguments)

        original = Offload._take
        with pytest.MonkeyPatch.context() as patch:  # units hold it by weak references only
            patch.setattr(Offload, "_take", take_late)
            return trained(make, {"stage": 3}, FORMATS["bf16"], steps=5, device=GPU)

    assert losses(late=True) == losses(late=False)


@pytest.mark.parametrize("settings", [FORMATS["fp32"], FORMATS["bf16"]], ids=["fp32", "bf16"])
@ranks(1)
def test_the_host_waits_for_no_copy_of_a_gradient_in_backward(settings):
    """With pinned memory on both sides; a blocking copy of FSDP2's would wait for all before it."""
    on_host = ON_HOST | {"offload_param": {"device": "cpu", "pin_memory": True}}
    sharding = sharded(on_host, settings, GPU)
    optimizer = on_gpu(sharding)
    for step in range(2):  # the first one allocates
        with sharding.micro_step(last=True):
            loss = loss_of(sharding.model, tokens_of(step).to(GPU))
            if step:
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        optimizer_step(optimizer, sharding)
    assert all(parameter.to_local().is_pinned() for parameter in sharding.model.parameters())


@ranks(1)
def test_an_evaluation_after_backward_reads_weights_that_the_step_has_not_written():
    """Weights on the host are copied for each use, and the optimizer writes to the same memory."""
    on_host = ON_HOST | {"offload_param": {"device": "cpu", "pin_memory": True}}

    def losses(*, waits: bool) -> list[float]:
        sharding = sharded(on_host, FORMATS["bf16"], GPU)
        optimizer, values = on_gpu(sharding), []
        for step in range(4):
            with sharding.micro_step(last=True):
                loss_of(sharding.model, tokens_of(step).to(GPU)).backward()
            torch.cuda._sleep(LATE_CYCLES)
            with torch.no_grad():
                values.append(loss_of(sharding.model, tokens_of(9).to(GPU)))
            if waits:
                torch.cuda.synchronize()
            optimizer_step(optimizer, sharding)
        return torch.stack(values).tolist()

    assert losses(waits=False) == losses(waits=True)


@GOES_ON
@ranks(1)
def test_a_backward_that_fails_adds_nothing_to_a_later_step():
    """Out of memory in the second micro-batch, and the step is done anew."""

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    def fail_in_backward(module: object, arguments: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    def gradients(*, fails: bool) -> list[torch.Tensor]:
        sharding = sharded({"stage": 2}, FORMATS["bf16"], GPU)
        optimizer = on_gpu(sharding)
        if fails:
            for index in range(2):
                with sharding.micro_step(last=index == 1):
                    tokens = tokens_of(index).to(GPU)
                    if index == 0:
                        loss_of(sharding.model, tokens).backward()
                        continue
                    hook = sharding.model.blocks[0].register_forward_hook(fail_in_backward)
                    loss = loss_of(sharding.model, tokens)
                    hook.remove()
                    with pytest.raises(RuntimeError, match="out of memory"):
                        loss.backward()
            optimizer.zero_grad()
        with sharding.micro_step(last=True):
            loss_of(sharding.model, tokens_of(3).to(GPU)).backward()
        optimizer.await_gradients()
        return [master.grad.to_local().clone() for master in optimizer.masters.values()]

    for actual, expected in zip(gradients(fails=True), gradients(fails=False), strict=True):
        assert torch.equal(actual, expected)


@ranks(2)
def test_a_delayed_update_is_that_of_the_cpu():
    """fp32 sums in another order, as in test_losses_are_those_of_adam_on_the_gpu."""

    def losses(device: str) -> list[float]:
        sharding = sharded({"stage": 3}, FORMATS["fp32"], device)
        place = torch.device(device)
        offload = Offload(sharding, place, pin_memory=device == GPU, delayed=True)
        groups = [{"params": list(sharding.model.parameters())}]
        optimizer, values = DelayedAdam(offload, groups, warmup=2, **ADAM), []
        for step in range(STEPS):
            mine = tokens_of(step).to(device).chunk(2)[sharding.group.rank()]
            with sharding.micro_step(last=True):
                loss = loss_of(sharding.model, mine)
                loss.backward()
            values.append(loss.item())
            optimizer_step(optimizer, sharding, clip_grad=0.5)
        return values

    assert losses(GPU) == pytest.approx(losses("cpu"), rel=1e-4)
