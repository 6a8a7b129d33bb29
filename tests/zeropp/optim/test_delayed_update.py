"""The delayed update runs beside the next step and equals Adam delayed by one step."""

import logging
import threading

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, run
from tests.zeropp.optim.test_offload import ADAM, FORMATS, offloaded, plain, sharded
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import LossScaler, Sharding, ZeroConfig, optimizer_step, shard
from zeropp.capabilities.offload.host_masters import HOST, Offload
from zeropp.capabilities.offload.offloaded_adam import DelayedAdam
from zeropp.optim.step_or_skip import local_part

STEPS, WARMUP = 6, 2
DELAYED = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "zeropp": {"delayed_param_update": True, "delayed_param_update_warmup": WARMUP},
}


def build_delayed_adam(sharding: Sharding, warmup: int = WARMUP, ratio: float = 1.0) -> DelayedAdam:
    offload = Offload(sharding, HOST, ratio=ratio, pin_memory=False, delayed=True)
    groups = [{"params": list(sharding.model.parameters())}]
    return DelayedAdam(offload, groups, warmup=warmup, **ADAM)


def backward(sharding: Sharding, step: int, scale: float = 1.0) -> float:
    mine = tokens_of(step).chunk(sharding.num_ranks)[dist.get_rank()].chunk(2)
    for index, tokens in enumerate(mine):
        with sharding.micro_step(last=index == 1):
            loss = loss_of(sharding.model, tokens)
            (loss * scale / 2).backward()
    return loss.item()


def losses_of_late_weights(zero: dict) -> list[float]:
    """Losses where each update is made on the newest weights, and shown to the model a step later.

    Adam itself is not late: only the weights that the model sees are.
    """
    sharding = sharded(zero, FORMATS["fp32"])
    optimizer = plain(sharding)
    own = [local_part(parameter.detach()) for parameter in sharding.model.parameters()]
    newest, losses = [weight.clone() for weight in own], []
    for step in range(STEPS):
        losses.append(backward(sharding, step))
        torch._foreach_copy_(own, newest)
        optimizer_step(optimizer, sharding, clip_grad=0.5)
        updated = [weight.clone() for weight in own]
        if step >= WARMUP:
            torch._foreach_copy_(own, newest)
        newest = updated
        sharding.weights_changed()
    return losses


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3}, ALL_THREE], ids=["1", "3", "all"])
@ranks(2, ranks_per_node=1)
def test_the_update_is_adams_one_step_late(zero):
    sharding = sharded(zero, FORMATS["fp32"])
    optimizer, losses = build_delayed_adam(sharding), []
    for step in range(STEPS):
        losses.append(backward(sharding, step))
        optimizer_step(optimizer, sharding, clip_grad=0.5)
    assert losses == losses_of_late_weights(zero)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(2)
def test_with_an_endless_warmup_it_equals_offload(settings):
    def losses(make) -> list[float]:
        sharding = sharded({"stage": 2}, settings)
        optimizer, step_losses = make(sharding), []
        for step in range(4):
            step_losses.append(backward(sharding, step))
            optimizer_step(optimizer, sharding)
        return step_losses

    assert losses(lambda sharding: build_delayed_adam(sharding, warmup=100)) == losses(offloaded)


@ranks(1)
def test_the_next_step_does_not_wait_for_the_update(monkeypatch):
    sharding = sharded({"stage": 2}, FORMATS["bf16"])
    optimizer = build_delayed_adam(sharding, warmup=0)
    go, update = threading.Event(), optimizer._update_all

    def wait_and_update(*arguments) -> None:
        assert go.wait(60)
        update(*arguments)

    monkeypatch.setattr(optimizer, "_update_all", wait_and_update)
    weight = next(sharding.model.parameters())
    before = weight.detach().clone()
    backward(sharding, 0)
    optimizer_step(optimizer, sharding)
    backward(sharding, 1)  # with an update under way
    assert torch.equal(weight, before)
    go.set()
    newest = optimizer.masters[weight].detach().bfloat16()
    assert torch.equal(weight, before) and not torch.equal(weight, newest)
    optimizer_step(optimizer, sharding)
    assert torch.equal(weight, newest)


@ranks(1)
def test_an_error_of_the_update_is_raised(monkeypatch):
    sharding = sharded({"stage": 2}, FORMATS["bf16"])
    optimizer = build_delayed_adam(sharding, warmup=0)
    backward(sharding, 0)

    def broken(*_: object) -> None:
        raise RuntimeError("the update broke")

    monkeypatch.setattr(optimizer, "_update_all", broken)
    optimizer_step(optimizer, sharding)
    with pytest.raises(RuntimeError, match="the update broke"):
        optimizer.state_dict()


@ranks(1)
def test_an_overflowing_step_does_not_disturb_a_running_update():
    sharding = sharded({"stage": 3}, FORMATS["fp16"])
    optimizer, scaler = (
        build_delayed_adam(sharding, warmup=0),
        LossScaler(scale=2.0**8, hysteresis=1),
    )
    backward(sharding, 0, scaler.scale)
    assert not optimizer_step(optimizer, sharding, scaler=scaler).skipped
    expected = {name: master.clone() for name, master in named_masters(sharding, optimizer).items()}
    backward(sharding, 1, float("inf"))
    assert optimizer_step(optimizer, sharding, scaler=scaler).skipped
    masters = named_masters(sharding, optimizer)
    assert all(torch.equal(masters[name], master) for name, master in expected.items())


def named_masters(sharding: Sharding, optimizer: DelayedAdam) -> dict[str, torch.Tensor]:
    masters = optimizer.masters
    return {
        name: local_part(masters[parameter].detach())
        for name, parameter in sharding.model.named_parameters()
    }


@ranks(1)
def test_a_running_update_does_not_overwrite_loaded_weights():
    sharding = sharded({"stage": 3}, FORMATS["bf16"])
    optimizer = build_delayed_adam(sharding, warmup=0)
    backward(sharding, 0)
    optimizer_step(optimizer, sharding)
    state = {
        name: torch.full_like(tensor, 0.5) for name, tensor in sharding.model.state_dict().items()
    }
    sharding.model.load_state_dict(state)
    assert all((master == 0.5).all() for master in named_masters(sharding, optimizer).values())
    optimizer.step()  # begins with what is left to send
    assert all((local_part(parameter) == 0.5).all() for parameter in sharding.model.parameters())


@ranks(2)
def test_the_delay_may_be_switched_off_and_on(tmp_path):
    """Without it, training goes on from the newest weights: what was saved is loaded whole."""
    late = config_of(bf16={"enabled": True}) | DELAYED
    plain_config = {name: value for name, value in late.items() if name != "zeropp"}
    for here, there in ((late, plain_config), (plain_config, late)):
        engine, again = engine_of(here), engine_of(there)
        run(engine, WARMUP + 2)
        engine.save_checkpoint(tmp_path)
        again.load_checkpoint(tmp_path)
        masters = again.optimizer.masters
        for (own, master), saved in zip(
            masters.items(), engine.optimizer.masters.values(), strict=True
        ):
            assert torch.equal(local_part(master), local_part(saved))
            assert torch.equal(local_part(own), local_part(master).bfloat16())


def engine_of(config: dict) -> zeropp.Engine:
    return zeropp.initialize(model=small_model(), config=config)[0]


def test_its_memory_is_logged(caplog):
    with caplog.at_level(logging.INFO, "zeropp"):
        build_delayed_adam(shard(small_model(), None, ZeroConfig()))
    elements = sum(parameter.numel() for parameter in small_model().parameters())
    size = elements * (16 + 4) / 2**30
    assert f"{elements:,} parameters of this rank in host memory, {size:.2f} GiB" in caplog.text


@ranks(2)
def test_the_16_bit_model_has_the_newest_weights(tmp_path):
    engine = engine_of(config_of(bf16={"enabled": True}) | DELAYED)
    run(engine, WARMUP + 2)
    path = engine.save_16bit_model(tmp_path)
    masters = engine.optimizer.masters
    expected = {
        name: masters[parameter].full_tensor()
        for name, parameter in engine.module.named_parameters()
    }
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(saved[name], tensor.bfloat16()) for name, tensor in expected.items())


@ranks(1)
def test_the_update_uses_as_many_threads_as_the_caller(monkeypatch):
    """PyTorch keeps the number of threads for each thread: the first update fixed that of all."""
    sharding = sharded({"stage": 2}, FORMATS["fp32"])
    optimizer, used = build_delayed_adam(sharding, warmup=0), []

    def record(*_: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        used.append(torch.get_num_threads())

    monkeypatch.setattr(optimizer, "_update", record)
    before = torch.get_num_threads()
    try:
        for step, threads in enumerate((1, 2)):
            torch.set_num_threads(threads)
            backward(sharding, step)
            optimizer_step(optimizer, sharding)
            optimizer.settle()
        assert used == [1, 2]
    finally:
        torch.set_num_threads(before)
