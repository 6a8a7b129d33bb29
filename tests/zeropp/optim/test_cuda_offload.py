"""ZeRO-Offload with a GPU: the losses of Adam on the GPU, and copies that wait for each other."""

import pytest
import torch

from tests.gpu import GPU, MARKS
from tests.ranks import ranks
from tests.zeropp.optim.test_offload import FORMATS, OFFLOAD, offloaded, plain, sharded, trained
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, tokens_of
from zeropp.optim.offload import HOST

pytestmark = MARKS
ON_HOST = {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}}


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
        expected, rel=1e-3 if settings or zero is ALL_THREE else 1e-5
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
        assert own.device.type == ("cpu" if zero is ON_HOST else "cuda")
        local = master.to_local()
        assert local.device == HOST and local.is_pinned() and master.grad.to_local().is_pinned()


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
