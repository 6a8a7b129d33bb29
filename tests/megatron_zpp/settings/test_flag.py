"""Flags that have no effect beside others: the log says so, and only then."""

import logging

import pytest

from megatron_zpp.settings.arguments import FLAGS
from megatron_zpp.settings.config import Config
from tests.megatron_zpp.settings.command_lines import config_of
from zeropp.settings.zero_config import ZeroConfig

# A setting without effect beside the settings behind it, and beside others that give it one.
PAIRS = """
--num-layers 3 | --pretrained-checkpoint m --data-path d | --data-path d
--hidden-dropout 0.3 | --pretrained-checkpoint m --data-path d | --data-path d
--rotary-base 500 | --pretrained-checkpoint m --data-path d | --use-rotary-position-embeddings
--lora-alpha 3 | | --lora-rank 4 --pretrained-checkpoint m --data-path d
--lora-dropout 0.5 | | --lora-rank 4 --pretrained-checkpoint m --data-path d
--save-interval 5 | | --save s
--no-save-optim | | --save s
--finetune | | --load s
--reset-iteration | | --load s
--override-opt_param-scheduler | | --load s
--fp32-residual-connection | | --bf16
--hysteresis 3 | | --fp16
--loss-scale 8 | --bf16 | --fp16
--initial-loss-scale 16 | --fp16 --loss-scale 8 | --fp16
--lr-wsd-decay-iters 5 | | --lr-decay-style WSD
--min-lr 1e-06 | --lr-decay-style constant | --lr-decay-style cosine
--lr-decay-iters 5 | --lr-decay-tokens 9000 | --lr-decay-style cosine
--lr-decay-samples 5 | --lr-decay-tokens 9000 | --lr-decay-style cosine
--lr-warmup-init 1e-06 | | --lr-warmup-iters 3
--recompute-num-layers 2 | | --checkpoint-activations
--rotary-base 500 | | --use-rotary-position-embeddings
--use-rope-scaling | | --use-rotary-position-embeddings
--use-rope-scaling | --multi-latent-attention --rope-type yarn | --use-rotary-position-embeddings
--rope-scaling-factor 4 | | --use-rope-scaling --use-rotary-position-embeddings
--split 9,1,0 | --mock-data | --data-path d
--data-cache-path c | --mock-data | --data-path d
--data-cache-path c | --data-path d.jsonl | --data-path d
--fim-spm-rate 0.25 | | --fim-rate 0.5
--eval-interval 5 | --eval-iters 0 | --eval-iters 1
--sample-length 5 | | --sample-prompt def
--tensorboard-queue-size 5 | | --tensorboard-dir t
--log-timers-to-tensorboard | | --wandb-project p
--wandb-exp-name e | | --wandb-project p
"""


def notices(line: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, "megatron_zpp")
    caplog.clear()
    config_of(line)
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "has no effect here" in message]


@pytest.mark.parametrize("pair", PAIRS.strip().splitlines())
def test_it_says_so_where_it_has_no_effect(pair, caplog):
    setting, without, with_effect = pair.split("|")
    (message,) = notices(setting + without, caplog)
    assert message.startswith(setting.strip())
    assert notices(setting + with_effect, caplog) == []


def test_every_reason_reads_and_every_condition_takes_a_configuration():
    conditions = 0
    for flag in FLAGS:
        for reason in flag.no_effect:
            assert len(reason.why) > 10 and reason.why[-1] != ".", flag.name
            if reason.when is not None:
                conditions += 1
                assert reason.when(Config()) in (True, False), flag.name
    assert conditions > 50


def test_flags_with_the_same_meaning_as_a_key_translate_its_default_there_and_back():
    for flag in FLAGS:
        if flag.same_as is None or flag.same_as.index is not None:
            continue
        default = ZeroConfig().value(flag.same_as.key)
        if default is None or flag.same_as.to_json(flag.same_as.flag_value(default)) is None:
            continue
        assert flag.same_as.to_json(flag.same_as.flag_value(default)) == default, flag.name
