"""Values that follow from others, those of an empty command line, and what is said of them."""

import logging

import pytest

from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.settings.command_lines import config_of, error_of


@pytest.mark.parametrize(
    ("line", "ranks", "sizes"),
    [
        ("", 4, (4, 16)),
        ("--batch-size 3", 2, (3, 6)),
        ("--global-batch-size 24", 4, (3, 24)),  # 6 a rank: the largest divisor up to 4
        ("--global-batch-size 16", 2, (4, 16)),
        ("--global-batch-size 24 --rampup-batch-size 4 4 10", 2, (2, 24)),
    ],
)
def test_batch_sizes_complete_each_other(line, ranks, sizes):
    batch = config_of(line, ranks).batch
    assert (batch.micro_batch_size, batch.global_batch_size) == sizes


def test_a_global_batch_that_does_not_divide_names_all_three_numbers():
    message = error_of("--global-batch-size 10 --micro-batch-size 2", 4)
    assert "global batch size 10" in message
    assert "micro-batch size 2 x 4 data-parallel ranks = 8" in message
    ramp = error_of("--global-batch-size 16 --micro-batch-size 1 --rampup-batch-size 8 2 9", 4)
    assert "global batch size 14 in --rampup-batch-size 8 2 9" in ramp


def test_defaults_of_an_empty_command_line_are_logged(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config = parse([], 2)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    for words in ("--num-layers 4", "--train-iters 100", "--lr 0.0003", "standard library"):
        assert words in messages[0]
    assert config.training.train_iters == 100
    assert config.model.max_position_embeddings == config.model.seq_length
    assert config.zero.stage == 0
    caplog.clear()
    config_of("--data-path x --train-iters 5 --lr 1 --num-layers 1 --hidden-size 8 --seq-length 8 "
          "--num-attention-heads 1 --batch-size 1 --global-batch-size 2", 2)  # fmt: skip
    assert not caplog.records


def test_tokens_beside_samples_say_where_the_run_ends(caplog):
    """As most of Megatron-DeepSpeed's scripts give them."""
    caplog.set_level(logging.INFO, "megatron_zpp")
    config_of("--train-samples 999 --train-tokens 2048 --seq-length 256 --batch-size 2")
    assert "ends the run, after 4 iterations" in caplog.text
