"""ZeRO-Offload under `zeropp.initialize`, with models, optimizers and schedules of the caller."""

import gc
import warnings
import weakref

import pytest
import torch

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import CLIP, SAMPLES, run
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import Engine, FusedAdam, InputError

ON_HOST = {"offload_optimizer": {"device": "cpu"}}
FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
LR = 1e-2


def settings_of(zero: dict, **more: object) -> dict:
    return {
        "train_batch_size": SAMPLES, "gradient_clipping": CLIP, "zero_optimization": zero,
    } | more  # fmt: skip


def engine_of(zero: dict, model: SmallModel | None = None, **more: object) -> Engine:
    """An engine whose optimizer, our Adam, was made of all the model's parameters."""
    model = small_model() if model is None else model
    optimizer = FusedAdam(model.parameters(), lr=LR)
    return zeropp.initialize(model=model, optimizer=optimizer, config=settings_of(zero, **more))[0]


def partly_frozen() -> SmallModel:
    model = small_model()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].down.requires_grad_(False)
    return model


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(2)
def test_an_optimizer_may_hold_frozen_weights_too(settings):
    def losses(zero: dict) -> list[float]:
        return run(engine_of({"stage": 3} | zero, partly_frozen(), **settings))

    assert losses(ON_HOST) == losses({})


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(2)
def test_a_parameter_unfrozen_later_is_an_error_before_a_gradient_is_lost(settings):
    engine = engine_of({"stage": 3} | ON_HOST, partly_frozen(), **settings)
    run(engine, 1)
    engine.module.blocks[1].down.bias.requires_grad_(True)
    with pytest.raises(InputError, match=r"blocks\.1\.down\.bias requires gradients.*freeze it"):
        run(engine, 1)


@ranks(2)
def test_a_schedule_of_a_passed_optimizer_continues_after_loading(tmp_path):
    def scheduled() -> Engine:
        model = small_model()
        adam = FusedAdam(model.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (step + 1))
        settings = settings_of({"stage": 2} | ON_HOST)
        return zeropp.initialize(
            model=model, optimizer=adam, lr_scheduler=schedule, config=settings
        )[0]

    engine, again = scheduled(), scheduled()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of `lr_scheduler.step")
        run(engine, 2)
    engine.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    assert run(again, 3, first=2) == run(engine, 3, first=2)
    assert again.get_lr() == engine.get_lr() == pytest.approx([LR / 6])


@pytest.mark.parametrize("zero", [{}, ON_HOST], ids=["on the device", "offloaded"])
@ranks(2)
def test_loading_moments_of_another_optimizer_is_an_error(zero, tmp_path):
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    settings = settings_of({"stage": 3})
    sgd_engine = zeropp.initialize(model=model, optimizer=sgd, config=settings)[0]
    run(sgd_engine, 1)
    sgd_engine.save_checkpoint(tmp_path)
    with pytest.raises(InputError, match="holds momentum_buffer.*Adam.*exp_avg, exp_avg_sq"):
        engine_of({"stage": 3} | zero).load_checkpoint(tmp_path)


@ranks(1)
def test_one_rank_with_weak_references_to_its_weights():
    model = small_model()
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    late = {"delayed_param_update": True, "delayed_param_update_warmup": 0}
    engine = engine_of({"stage": 2} | ON_HOST, model, zeropp=late)
    run(engine, 2)
    assert all(
        reference() is parameter
        for reference, parameter in zip(references, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2}, {"stage": 3}], ids=str)
@pytest.mark.parametrize("place", [{}, ON_HOST], ids=["on the device", "offloaded"])
@ranks(2)
def test_an_engine_that_nobody_holds_is_freed(zero, place):
    engine = engine_of(zero | place)
    run(engine, 2)
    parts = (engine.module, engine.optimizer, engine.sharding, next(engine.parameters()))
    references = [weakref.ref(part) for part in parts]
    del engine, parts
    gc.collect()
    assert [type(reference()).__name__ for reference in references] == ["NoneType"] * 4


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 2} | ON_HOST, {"stage": 3} | ON_HOST])
@ranks(2)
def test_gradients_may_be_discarded(zero):
    """By the engine, by its optimizer, and those of a pass that failed."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine = engine_of(zero)
    losses = run(engine, 1)
    handle = engine.module.blocks[1].norm.register_full_backward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss_of(engine, tokens_of(9)))
    handle.remove()
    with pytest.raises(InputError):
        engine.step()
    engine.zero_grad()
    for number, discarding in enumerate((engine, engine.optimizer), 1):
        engine.backward(loss_of(engine, tokens_of(9)))
        discarding.zero_grad()
        losses += run(engine, 1, number)
    assert losses == run(engine_of(zero), 3)
