"""Units with modules that do not run in every pass: experts, and inactive adapters."""

import peft
import pytest
import torch
from torch import nn

import zeropp
from tests.megatron_zpp.interchange.foreign_models import llama
from tests.ranks import ranks
from tests.zeropp.deepspeed import test_peft
from tests.zeropp.lora_model import (
    add_adapters,
    engine_losses,
    expected_losses,
    with_quantized_weights,
)
from tests.zeropp.sharding.test_cut import CONFIG, STEPS
from tests.zeropp.small_model import HIDDEN_SIZE, SmallModel, small_model


class Experts(nn.Module):
    """Layers with adapters, of which a pass takes the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE),
            nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(x)


def with_experts() -> SmallModel:
    model = small_model()
    for index in range(len(model.blocks)):
        model.blocks[index] = Experts()
    return add_adapters(model)


@ranks(2)
def test_a_unit_whose_first_module_does_not_run():
    expected = expected_losses(with_quantized_weights(with_experts(), 2), STEPS, 2, 2)
    engine, *_ = zeropp.initialize(model=with_experts(), config=CONFIG)
    assert engine_losses(engine, STEPS) == pytest.approx(expected, rel=1e-5)


def two_of_which_one_is_active(model: nn.Module) -> peft.PeftModel:
    model = test_peft.converted(model, ("q_proj", "v_proj"))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    return model


@ranks(2)
def test_an_adapter_that_is_not_active():
    expected = test_peft.plain_losses(
        with_quantized_weights(two_of_which_one_is_active(llama()), 2)
    )
    config = test_peft.config_of(test_peft.MIXZ)
    engine, *_ = zeropp.initialize(model=llama(), config=config)
    two_of_which_one_is_active(engine.module)
    engine.optimizer.quantize_nontrainable_params()
    assert test_peft.losses_of(engine) == pytest.approx(expected, rel=test_peft.CLOSE)
