"""Flags of mixtures of experts: what they fill, and which of them do not fit each other."""

import logging
from dataclasses import replace

import pytest

from megatron_zpp.capabilities.experts.model_settings import MoeConfig
from megatron_zpp.checkpoint.training_state import architecture
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.model import OF_TRAINING
from tests.megatron_zpp.settings.command_lines import config_of
from zeropp.settings.schema import settings_of

EXPERTS = "--num-experts 8 --disable-bias-linear"
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"
SIGMOID = "--moe-router-score-function sigmoid"


@pytest.mark.parametrize("number", [0, 1])
def test_a_dense_model_may_say_so(number: int, caplog: pytest.LogCaptureFixture) -> None:
    """As Megatron-DeepSpeed's scripts do, whose number of experts is 1 by default."""
    caplog.set_level(logging.INFO, "megatron_zpp")
    line = (
        f"--num-experts {number} --moe-router-topk 4 --moe-loss-coeff 0.1 --expert-interval 7 "
        "--mlp-type standard --moe-expert-parallel-size 1 --moe-train-capacity-factor 1 "
        "--moe-eval-capacity-factor 1 --moe-min-capacity 4 --disable-moe-token-dropping "
        "--create-moe-param-group"
    )
    default = config_of("")
    assert replace(config_of(line), parallel=default.parallel) == default
    (said,) = [message for message in caplog.messages if message.startswith("no effect")]
    for words in line.split(" --"):
        assert words.removeprefix("--") in said


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", [1, 1, 1, 1, 1]), ("2", [1, 0, 1, 0, 1]), ("9", [1, 0, 0, 0, 0]),
     ("[0]+[1]*4", [0, 1, 1, 1, 1]), ("([0]*2+[1]*3)", [0, 0, 1, 1, 1])],
)  # fmt: skip
def test_layers_with_experts(text: str, layers: list[int]) -> None:
    model = config_of(f"{EXPERTS} --num-layers 5 --moe-layer-freq {text}").model
    assert model.moe_layers == tuple(map(bool, layers))
    assert not any(config_of("--num-layers 5").model.moe_layers)


def test_capacity_factor() -> None:
    def factors(line: str) -> tuple[float | None, float | None]:
        model = config_of(f"{EXPERTS} {line}").model
        return model.capacity_factor(training=True), model.capacity_factor(training=False)

    assert factors("") == (None, None)
    assert factors("--moe-expert-capacity-factor 1.5") == (1.5, 1.5)
    assert factors("--moe-train-capacity-factor 1.5 --moe-eval-capacity-factor 2") == (1.5, 2.0)
    assert factors("--moe-expert-capacity-factor -1") == (None, None)
    assert factors("--moe-expert-capacity-factor 0 --moe-min-capacity 4") == (0.0, 0.0)
    assert factors("--moe-expert-capacity-factor 1 --disable-moe-token-dropping") == (None, None)


def test_auxiliary_losses() -> None:
    def losses(line: str) -> dict[str, float]:
        return config_of(f"{EXPERTS} {line}").model.auxiliary_losses

    assert losses("") == {} == losses("--moe-router-load-balancing-type none")
    assert losses("--moe-aux-loss-coeff 0.1") == {"aux_loss": 0.1}
    both = "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff"
    assert losses(f"{both} .1 .2") == {"seq_aux_loss": 0.1, "global_aux_loss": 0.2}
    assert losses(f"{both} 0 .2") == {"global_aux_loss": 0.2}


def test_how_many_experts_rank_a_group() -> None:
    def best(line: str) -> int:
        return config_of(f"{EXPERTS} --moe-router-topk 4 {GROUPS} {line}").model.group_best

    assert best("") == 2
    assert best("--moe-router-group-best 1") == 1


def test_a_checkpoint_knows_the_layer_and_not_its_training() -> None:
    names = {setting.name for setting in settings_of(MoeConfig)}
    dense = architecture(ModelConfig(), 50)
    assert not names & dense.keys()
    saved = architecture(config_of(f"{EXPERTS} {SIGMOID}").model, 50)
    assert saved.keys() - dense.keys() == names - {*OF_TRAINING, "moe_router_dtype"}
    assert {*OF_TRAINING} <= names
