"""A setting that changes nothing beside the others says so, and only then."""

import logging

import pytest

from megatron_zpp.settings.config import Config
from megatron_zpp.settings.no_effect import IDLE
from tests.megatron_zpp.settings.asking import asked

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
--lr-warmup-init 1e-06 | | --lr-warmup-iters 3
--recompute-num-layers 2 | | --checkpoint-activations
--rotary-base 500 | | --use-rotary-position-embeddings
--use-rope-scaling | | --use-rotary-position-embeddings
--rope-scaling-factor 4 | | --use-rope-scaling --use-rotary-position-embeddings
--split 9,1,0 | --mock-data | --data-path d
--data-cache-path c | --mock-data | --data-path d
--data-cache-path c | --data-path d.jsonl | --data-path d
--eval-interval 5 | --eval-iters 0 | --eval-iters 1
--sample-length 5 | | --sample-prompt def
--tensorboard-queue-size 5 | | --tensorboard-dir t
--log-timers-to-tensorboard | | --wandb-project p
--wandb-exp-name e | | --wandb-project p
"""


def said(line: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, "megatron_zpp")
    caplog.clear()
    asked(line)
    told = [record.getMessage() for record in caplog.records]
    return [message for message in told if "has no effect here" in message]


@pytest.mark.parametrize("pair", PAIRS.strip().splitlines())
def test_it_says_so_where_it_has_no_effect(pair, caplog):
    setting, without, with_effect = pair.split("|")
    (message,) = said(setting + without, caplog)
    assert message.startswith(setting.strip())
    assert said(setting + with_effect, caplog) == []


def test_every_setting_named_exists():
    parts = vars(Config()).values()
    for name in (name for one in IDLE for name in one.settings):
        assert name == "use_pin_memory" or any(hasattr(part, name) for part in parts), name
