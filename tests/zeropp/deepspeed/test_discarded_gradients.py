"""Gradients of a step that is given up, by loading or `zero_grad`, are not part of the next one."""

import pytest
import torch

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, run
from tests.zeropp.small_model import SmallModel, loss_of, tokens_of
from zeropp import Engine

BF16 = {"bf16": {"enabled": True}}
HOST = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
SETTINGS = {
    **{f"stage {stage}": dict(stage=stage) for stage in (0, 1, 3)},
    **{f"stage {stage} in bf16": dict(stage=stage, **BF16) for stage in (0, 1, 3)},
    "offloaded": HOST | BF16,
}


def half_step(engine: Engine) -> None:
    """One of two micro-batches, whose gradients are far larger than others."""
    engine.backward(1000.0 * loss_of(engine, tokens_of(9)))
    engine.step()


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_the_half_step_before_loading_and_zero_grad_has_no_effect(name, tmp_path):
    engine = engine_of(micro_batches=2, **SETTINGS[name])
    engine.save_checkpoint(tmp_path)
    expected = run(engine, 2), engine.get_global_grad_norm()
    for module_only in (True, False):
        half_step(engine)
        engine.load_checkpoint(tmp_path, load_module_only=module_only)
        assert engine.micro_steps == (4 if module_only else 0)
    for set_to_none in (True, False):
        engine.load_checkpoint(tmp_path)
        half_step(engine)
        if set_to_none:
            engine.sharding.release()  # of whole weights, on which stages 0 and 1 accumulate
        engine.zero_grad(set_to_none)
        engine.micro_steps = 0
        assert (run(engine, 2), engine.get_global_grad_norm()) == expected


class Skipping(SmallModel):
    """The small model; a forward pass may leave one block's first layer out."""

    skips = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        up = self.blocks[0].up
        self.blocks[0].up.forward = (
            (lambda x: x.repeat(1, 1, 2)[..., :19]) if self.skips else type(up).forward.__get__(up)
        )
        return super().forward(tokens)


@pytest.mark.parametrize("stage", [1, 2])
@ranks(2)
def test_a_discarded_gradient_of_a_parameter_that_is_then_not_used(stage):
    torch.manual_seed(5)
    engine = engine_of(Skipping(), micro_batches=2, stage=stage)
    torch.manual_seed(5)
    expected = engine_of(Skipping(), micro_batches=2, stage=stage)
    half_step(engine)
    engine.zero_grad()
    engine.micro_steps = 0
    engine.module.skips = expected.module.skips = True
    assert run(engine, 2) == run(expected, 2)
