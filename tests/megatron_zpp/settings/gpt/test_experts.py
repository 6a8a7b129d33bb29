"""Flags of mixtures of experts: what they fill, and which of them do not fit each other."""

import json
import logging

import pytest

from megatron_zpp.checkpoint.training_state import architecture
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.settings.gpt.experts import OF_TRAINING, MoeConfig
from tests.megatron_zpp.settings.command_lines import config_of, error_of, value_at
from tests.megatron_zpp.settings.expert_flags import OF_EXPERTS
from zeropp.settings.schema import settings_of

EXPERTS = "--num-experts 8 --disable-bias-linear"
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"
SIGMOID = "--moe-router-score-function sigmoid"
LINES = [line for line in OF_EXPERTS.splitlines() if line]


@pytest.mark.parametrize("line", LINES)
def test_a_flag_fills_its_setting(line: str) -> None:
    words = line.split()
    at = next(i for i, word in enumerate(words) if word in ModelConfig.__dataclass_fields__)
    typed, value = " ".join(words[:at]), json.loads(" ".join(words[at + 1 :]))
    names = [word.replace("-", "_").replace("__", "--") if word[:2] == "--" else word
             for word in typed.split()]  # fmt: skip
    for spelled in (typed, " ".join(names)):
        config = config_of(f"{EXPERTS} {spelled}" if "--num-experts" not in typed else EXPERTS)
        assert value_at(config.model, words[at]) == value, spelled


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        ("--moe-router-num-groups 3 --moe-router-group-topk 1", "not divisible by"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 3", "is more than"),
        ("--moe-router-num-groups 4", "needs --moe-router-group-topk"),
        ("--moe-router-group-topk 4", "--moe-router-num-groups"),
        (f"{GROUPS} --moe-router-topk 5", "more than the 4 experts of --moe-router-group-topk 2"),
        (f"{GROUPS} --moe-router-group-best 3", "give at most 2"),
        ("--moe-router-enable-expert-bias", "sigmoid or sqrtsoftplus, not softmax"),
        ("--moe-router-topk 1", "needs --moe-router-pre-softmax"),
        ("--moe-router-load-balancing-type aux_loss aux_loss", "give each type once"),
        ("--moe-router-load-balancing-type none aux_loss", "none only by itself"),
        ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff .1",
         "2 types need as many coefficients"),
        ("--moe-aux-loss-coeff .1 .2", "1 types need as many coefficients"),
        ("--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"),
        ("--moe-expert-capacity-factor 0", "lets experts take no token at all"),
        ("--moe-expert-capacity-factor 1 --moe-eval-capacity-factor 0", "no token at all"),
        ("--moe-layer-freq [0,1]", "has 2 numbers, but there are 4 layers"),
        ("--moe-layer-freq 0", "expected a whole number above 0"),
        ("--moe-layer-freq [0]*4", "no layer of the 4 has experts"),
        ("--expert-interval 5", "no layer of the 4 has experts"),
        ("--expert-interval 2 --moe-layer-freq 2", "give one"),
        ("--moe-router-score-function tanh", "expected one of softmax, sigmoid, sqrtsoftplus"),
        ("--moe-token-dispatcher-type mail", "leave it out"),
    ],
)  # fmt: skip
def test_what_does_not_fit(line: str, words: str) -> None:
    assert words in error_of(f"{EXPERTS} {line}")


def test_experts_without_their_number() -> None:
    message = error_of("--moe-router-topk 4 --moe-aux-loss-coeff 0.1")
    assert "--moe-router-topk 4, --moe-aux-loss-coeff 0.1: how many experts" in message


@pytest.mark.parametrize("number", [0, 1])
def test_a_dense_model_may_say_so(number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_zpp")
    line = f"--num-experts {number} --moe-router-topk 4 --moe-loss-coeff 0.1 --expert-interval 7"
    assert config_of(line) == config_of("")
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
