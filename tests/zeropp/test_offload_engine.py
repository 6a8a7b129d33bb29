"""ZeRO-Offload under `zeropp.initialize`, with models, optimizers and schedules as people have."""

import pytest

import zeropp
from tests.ranks import ranks
from tests.zeropp.engines import CLIP, SAMPLES, run
from tests.zeropp.stack import Stack, fresh_stack
from zeropp import Engine, FusedAdam

ON_HOST = {"offload_optimizer": {"device": "cpu"}}
FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
LR = 1e-2


def settings_of(zero: dict, **more: object) -> dict:
    return {
        "train_batch_size": SAMPLES, "gradient_clipping": CLIP, "zero_optimization": zero,
    } | more  # fmt: skip


def engine_of(zero: dict, model: Stack | None = None, **more: object) -> Engine:
    """An engine whose optimizer, our Adam, was made of all the model's parameters."""
    model = fresh_stack() if model is None else model
    given = FusedAdam(model.parameters(), lr=LR)
    return zeropp.initialize(model=model, optimizer=given, config=settings_of(zero, **more))[0]


def partly_frozen() -> Stack:
    model = fresh_stack()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].down.requires_grad_(False)
    return model


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@ranks(2)
def test_an_optimizer_may_hold_frozen_weights_too(settings):
    def losses(zero: dict) -> list[float]:
        return run(engine_of({"stage": 3} | zero, partly_frozen(), **settings))

    assert losses(ON_HOST) == losses({})
