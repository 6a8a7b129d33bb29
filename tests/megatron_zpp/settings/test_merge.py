"""Flags and JSON on the same thing: contradictions named on both sides, else one value for both."""

import logging

import pytest

from tests.megatron_zpp.settings.command_lines import config_of, value_at


@pytest.mark.parametrize(
    ("flag", "file", "path", "value"),
    [
        ("--loss-scale 128", {"loss_scale": 0}, "loss_scale", None),
        ("--loss-scale 128", {"loss_scale": 64}, "loss_scale", 64.0),
        (
            "--initial-loss-scale 65536", {"initial_scale_power": 12}, "initial_loss_scale", 4096.0,
        ),
        ("--min-loss-scale 2", {"min_loss_scale": 1}, "min_loss_scale", 1.0),
        ("--loss-scale-window 9", {"loss_scale_window": 8}, "loss_scale_window", 8),
        ("--hysteresis 3", {"hysteresis": 2}, "hysteresis", 2),
    ],
)  # fmt: skip
def test_the_loss_scale_of_the_json_counts_and_a_line_says_so(
    flag, file, path, value, tmp_path, caplog
):
    """DeepSpeed scales the loss of Megatron-DeepSpeed, by its JSON, whatever the flags say."""
    caplog.set_level(logging.INFO, "megatron_zpp")
    (key, in_json), *_ = file.items()
    config = config_of(flag, 1, {"fp16": {"enabled": True, **file}}, tmp_path)
    assert value_at(config.precision, path) == value
    lines = [record.getMessage() for record in caplog.records if flag in record.getMessage()]
    assert len(lines) == 1 and f"fp16.{key} = {in_json}" in lines[0] and "ds.json" in lines[0]
    caplog.clear()
    config_of("--fp16 " + flag, 1, {"fp16": {"loss_scale_window": "auto"}}, tmp_path)
    assert "which counts" not in caplog.text


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--zero-stage 3", "zero.stage", 3),
        ("--bf16", "zero.compute_format", "bfloat16"),
        ("--fp16", "zero.fp16.initial_scale_power", 32),
        ("--fp16 --loss-scale 64", "zero.fp16.loss_scale", 64.0),
        ("--clip-grad 0.5", "zero.gradient_clipping", 0.5),
        ("", "zero.gradient_clipping", 1.0),
        ("--lr 0.01 --adam-beta1 .8", "zero.optimizer.params.betas", [0.8, 0.999]),
        ("--cpu_torch_adam", "zero.optimizer.params.torch_adam", True),
        ("--batch-size 2 --global-batch-size 16", "zero.gradient_accumulation_steps", 2),
        ("--batch-size 2 --global-batch-size 16", "zero.train_batch_size", 16),
    ],
)
def test_the_zero_section_is_settled_from_the_flags(line, path, value, tmp_path):
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"params": {"lr": "auto", "betas": "auto"}},
        "fp16": {"enabled": "auto", "initial_scale_power": "auto", "loss_scale": "auto"},
        "bf16": {"enabled": "auto"},
    }
    ranks = 4
    assert value_at(config_of(line, ranks), path) == value
    filled = config_of(line, ranks, auto, tmp_path)
    assert value_at(filled, path) == value
    assert not filled.zero.auto_keys


def test_json_notices_are_passed_on(tmp_path, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config_of("--eval-iters 0 --eval-interval 5", 1, {"steps_per_print": 10}, tmp_path)
    assert "no effect here: --eval-interval 5 (" in caplog.text
    assert "); steps_per_print (use --log-interval)" in caplog.text
