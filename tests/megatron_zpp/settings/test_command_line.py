"""Bad command lines name the culprit; repeated flags; the help."""

import logging

import pytest

from tests.megatron_zpp.settings.command_lines import config_of, error_of


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--micro-batchsize 4", "unknown flag --micro-batchsize; the nearest known are"),
        ("--micro-batchsize 4", "--micro-batch-size"),
        ("--fp17", "--fp16"),
        ("--num-lay 4", "unknown flag --num-lay"),  # no abbreviations
        ("--ddp-impl local", "--DDP-impl"),
        ("--qqqqqq", "see --help"),
        ("--num-experts 8 --moe-router-topk 9", "--moe-router-topk 9"),
        ("--moe-router-topk 2", "--moe-router-topk 2: how many experts are there"),
        ("4", "'4' is not a flag"),
        ("--lr 1 2", "--lr takes 1 value, but 2 follow it: 1 2"),
        ("--lr", "--lr needs a value: a number"),
        ("--lr --fp16", "--lr needs a value"),
        ("--save=", "--save needs a value"),
        ("--data-path", "--data-path needs a value"),
        ("--fp16 true", "--fp16 takes no value, but 'true' follows it"),
        ("--fp16=1", "--fp16 takes no value"),
        ("--num-layers two", "--num-layers two: expected a whole number"),
        ("--num-layers 2.5", "--num-layers 2.5: expected a whole number"),
        ("--lr fast", "--lr fast: expected a number"),
        ("--lr nan", "--lr nan: expected a finite number"),
        ("--lr -1e-4", "--lr -0.0001: expected at least 0"),
        ("--batch-size -1", "--batch-size -1: expected at least 1"),
        ("--num-layers 0", "--num-layers 0: expected at least 1"),
        ("--seed -3", "--seed -3: expected at least 0"),
        ("--zero-stage 4", "--zero-stage 4: expected at most 3"),
        ("--hidden-dropout 1.5", "--hidden-dropout 1.5: expected at most 1"),
        ("--rampup-batch-size 4 4", "--rampup-batch-size takes 3 values, but 2"),
        ("--lr-decay-style cosin", "--lr-decay-style cosin: expected one of constant, linear"),
        ("--lr-decay-style cosin", "did you mean cosine?"),
        ("--optimizer sgd", "--optimizer sgd: expected one of adam"),
        ("--hidden-size 100 --num-attention-heads 3", "--hidden-size 100 is not divisible"),
        ("--seq-length 512 --max-position-embeddings 256", "--seq-length 512 is longer than"),
        ("--num-attention-heads 4 --num-query-groups 3", "--num-query-groups 3"),
        ("--fp16 --bf16", "--fp16 and --bf16 contradict"),
        ("--train-iters 5 --train-samples 9", "--train-iters 5 and --train-samples 9"),
        ("--train-iters 5 --lr-warmup-iters 6", "--lr-warmup-*"),
        ("--train-samples 3", "--train-samples is worth 3 samples of 256 tokens"),
        ("--batch-size 2 --micro-batch-size 3", "--batch-size 2 and --micro-batch-size 3"),
        ("--swiglu --openai-gelu", "--swiglu and --openai-gelu"),
        ("--no-position-embedding", "--position-embedding-type rope or none"),
        ("--use-rotary-position-embeddings --position-embedding-type none", "contradict"),
        ("--recompute-activations --checkpoint-activations", "contradict"),
        ("--checkpoint-activations --recompute-num-layers 9", "--num-layers 4"),
        ("--use-distributed-optimizer --zero-stage 0", "--use-distributed-optimizer"),
        ("--lr 1e-4 --min-lr 1e-3", "--min-lr 0.001 is larger than --lr 0.0001"),
        ("--deepspeed_config nowhere.json", "nowhere.json"),
    ],
)
def test_a_bad_command_line_names_the_culprit(line, named):
    assert named in error_of(line)


def test_the_same_setting_given_twice(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    assert config_of("--batch-size 2 --micro-batch-size 2").batch.micro_batch_size == 2
    assert "twice" not in caplog.text
    config = config_of("--lr 1e-3 --lr 1e-4 --seed 1 --seed 2 --seed 3")
    assert (config.optimizer.lr, config.training.seed) == (1e-4, 3)
    assert "given twice, the last is used: --lr 0.0001, --seed 3\n" in caplog.text


def test_all_mistakes_of_a_command_line_are_reported_at_once():
    first, *mistakes = error_of("--vocab-fil 2 --lr fast --seed 1 --hidden-sise").splitlines()
    assert first == "3 mistakes in the command line:" and len(mistakes) == 3
    assert mistakes[0].startswith("  unknown flag --vocab-fil; ")
    assert mistakes[1].startswith("  --lr fast: expected a number")
    assert mistakes[2].startswith("  unknown flag --hidden-sise; ")
