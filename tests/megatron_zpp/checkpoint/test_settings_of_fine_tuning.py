"""Which settings of a model `--finetune` may change: those that no weight depends on."""

from dataclasses import replace

import pytest
import torch

from megatron_zpp.checkpoint.training_state import OF_FINE_TUNING
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.model.small import LLAMA, VOCABULARY
from zeropp.settings.schema import settings_of

MODEL = replace(LLAMA, num_experts=4, moe_router_pre_softmax=True)
CHANGED = {  # where not any other value will do
    "rotary_percent": 0.5,
    "no_rope_freq": "[0,0,1]",
    "longrope_short_factors": (1.0,) * 4,
    "longrope_long_factors": (2.0,) * 4,
    "window_size": "4,0",
    "window_attn_skip_freq": "[1,0,1]",
    "softmax_type": "off-by-one",
    "moe_router_topk": 1,
}
SETTINGS = {each.name: each for each in settings_of(ModelConfig) if each.name in OF_FINE_TUNING}


def weights(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = GPT(config, VOCABULARY)
    return {name: each.shape for name, each in model.state_dict().items()}


def test_all_of_them_are_settings() -> None:
    assert SETTINGS.keys() == OF_FINE_TUNING


@pytest.mark.parametrize("name", SETTINGS)
def test_no_weight_depends_on_it(name: str) -> None:
    setting, now = SETTINGS[name], getattr(MODEL, name)
    others = [each for each in setting.choices or () if each != now]
    value = not now if setting.type is bool else (others or [(now or 1) * 2])[0]
    changed = replace(MODEL, **{name: CHANGED.get(name, value)})
    assert changed != MODEL and weights(changed) == weights(MODEL)
