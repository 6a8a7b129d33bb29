"""Flags and JSON on the same thing: contradictions named on both sides, else one value for both."""

import logging

import pytest

from tests.megatron_zpp.settings.command_lines import config_of, error_of, value_at


@pytest.mark.parametrize(
    ("line", "file", "named"),
    [
        ("--zero-stage 3", {"zero_optimization": {"stage": 2}}, ["--zero-stage 3", "stage = 2"]),
        ("--fp16", {"fp16": {"enabled": False}}, ["--fp16", "fp16.enabled = false"]),
        ("--fp16", {"bf16": {"enabled": True}}, ["--fp16", "bf16.enabled = true"]),
        ("--bf16", {"fp16": {"enabled": True}}, ["--bf16", "fp16.enabled = true"]),
        ("--bf16", {"bf16": {"enabled": False}}, ["--bf16", "bf16.enabled = false"]),
        (
            "--batch-size 2",
            {"train_micro_batch_size_per_gpu": 3},
            ["--batch-size 2", "train_micro_batch_size_per_gpu = 3"],
        ),
        (
            "--global-batch-size 8",
            {"train_batch_size": 16},
            ["--global-batch-size 8", "train_batch_size = 16"],
        ),
        ("--clip-grad 1", {"gradient_clipping": 0.5}, ["--clip-grad 1", "gradient_clipping = 0.5"]),
        ("--lr 1e-4", {"optimizer": {"params": {"lr": 1e-3}}}, ["--lr 0.0001", "lr = 0.001"]),
        (
            "--weight-decay .1",
            {"optimizer": {"params": {"weight_decay": 0.2}}},
            ["--weight-decay 0.1", "weight_decay = 0.2"],
        ),
        (
            "--adam-beta2 .95",
            {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
            ["--adam-beta2 0.95", "betas = [0.9, 0.999]"],
        ),
        ("--adam-eps 1e-6", {"optimizer": {"params": {"eps": 1e-8}}}, ["eps = 1e-08"]),
        (
            "--initial-loss-scale 65536",
            {"fp16": {"enabled": True, "initial_scale_power": 12}},
            ["--initial-loss-scale 65536", "initial_scale_power = 12"],
        ),
        ("--loss-scale 128", {"fp16": {"loss_scale": 0}}, ["--loss-scale 128", "loss_scale = 0"]),
        ("--min-loss-scale 2", {"fp16": {"min_loss_scale": 1}}, ["min_loss_scale = 1"]),
        ("--loss-scale-window 9", {"fp16": {"loss_scale_window": 8}}, ["loss_scale_window = 8"]),
        ("--hysteresis 3", {"fp16": {"hysteresis": 2}}, ["--hysteresis 3", "hysteresis = 2"]),
        (
            "--partition-activations",
            {"activation_checkpointing": {"partition_activations": False}},
            ["--partition-activations", "partition_activations = false"],
        ),
        (
            "--contigious-checkpointing",
            {"activation_checkpointing": {"contiguous_memory_optimization": False}},
            ["--contigious-checkpointing", "contiguous_memory_optimization = false"],
        ),
        (
            "--checkpoint-in-cpu",
            {"activation_checkpointing": {"cpu_checkpointing": False}},
            ["--checkpoint-in-cpu", "cpu_checkpointing = false"],
        ),
        (
            "--synchronize-each-layer",
            {"activation_checkpointing": {"synchronize_checkpoint_boundary": False}},
            ["--synchronize-each-layer", "synchronize_checkpoint_boundary = false"],
        ),
        (
            "--profile-backward",
            {"activation_checkpointing": {"profile": False}},
            ["--profile-backward", "profile = false"],
        ),
        (
            "--zero-reduce-bucket-size 5",
            {"zero_optimization": {"reduce_bucket_size": 6}},
            ["--zero-reduce-bucket-size 5", "reduce_bucket_size = 6"],
        ),
        (
            "--cpu-optimizer",
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            ["--cpu-optimizer", 'offload_optimizer.device = "none"'],
        ),
        (
            "--use-distributed-optimizer",
            {"zero_optimization": {"stage": 0}},
            ["--use-distributed-optimizer", "stage = 0"],
        ),
        (
            "--rampup-batch-size 4 4 60 --global-batch-size 16",
            {"gradient_accumulation_steps": 2},
            ["--rampup-batch-size", "gradient_accumulation_steps = 2"],
        ),
        (
            "--global-batch-size 16 --batch-size 2",
            {"gradient_accumulation_steps": 2},
            ["gradient_accumulation_steps = 2", "16", "micro-batch size 2", "1 data", "8"],
        ),
    ],
)
def test_flags_and_json_that_contradict_are_both_named(line, file, named, tmp_path):
    message = error_of(line, 1, file, tmp_path)
    for words in [*named, "ds.json", "contradict"]:
        assert words in message


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero.stage", 2),
        ({"bf16": {"enabled": True}}, "precision.format", "bfloat16"),
        ({"fp16": {"enabled": True}}, "precision.initial_loss_scale", 2.0**16),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 12}},
            "precision.initial_loss_scale",
            4096.0,
        ),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "precision.loss_scale", None),
        ({"fp16": {"enabled": True, "loss_scale": 64}}, "precision.loss_scale", 64.0),
        ({"gradient_clipping": 0.25}, "optimizer.clip_grad", 0.25),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.002}}}, "schedule.lr", 0.002),
        ({"optimizer": {"params": {"betas": [0.8, 0.95]}}}, "optimizer.adam_beta2", 0.95),
        ({"optimizer": {"params": {"lr": "auto"}}}, "optimizer.lr", 3e-4),
        ({"optimizer": {"params": {"torch_adam": True}}}, "optimizer.cpu_torch_adam", True),
        ({"train_micro_batch_size_per_gpu": 3}, "batch.global_batch_size", 3),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 4}, "batch.micro_batch_size", 3),
        ({"train_batch_size": 6}, "batch.micro_batch_size", 3),
        ({"train_batch_size": 6}, "zero.gradient_accumulation_steps", 2),
    ],
)
def test_what_only_the_json_gives_holds(file, path, value, tmp_path):
    assert value_at(config_of("", 1, file, tmp_path), path) == value


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
    config_of("", 1, {"steps_per_print": 10}, tmp_path)
    assert "ds.json: steps_per_print has no effect here" in caplog.text
