"""Flags as public launch scripts give them together: they are taken, and each has its effect."""

import json
import logging
from pathlib import Path

import pytest

from megatron_zpp.settings.arguments import parse
from tests.launched import ROOT
from tests.megatron_zpp.settings.command_lines import config_of, error_of
from tests.megatron_zpp.settings.tables import fork_flags, launch_scripts
from zeropp.errors import InputError

SCRIPTS = launch_scripts()
BLOOM, OFFLOAD = SCRIPTS["bloom"], SCRIPTS["offload_tutorial"].flags
FORKS = fork_flags()
WITH_JSON = ("gpt3", "zeropp_tutorial", "offload_tutorial")
GPT3_JSON = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": True,
    "fp16": {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
        "min_loss_scale": 1, "initial_scale_power": 11,
    },
    "bf16": {"enabled": False},
    "wall_clock_breakdown": False,
}  # fmt: skip
# Those that stood in the way of most of 164 public scripts, and what each says or sets.
ASKED = {
    "--no-train": "training.skip_train",
    "--pp-partition-method type:transformer --pipeline-model-parallel-size 2": (
        "parallel.pp_partition_method"
    ),
    "--abort-on-unmet-fused-kernel-constraints": "PyTorch's fused kernels",
    "--pad-vocab-size-to 1280": "model.pad_vocab_size_to",
    "--position-embedding-type rotary": "model.position_embedding_type",
    "--glu-activation geglu": "model.geglu",
    "--num-query-groups 1 --tensor-model-parallel-size 2": "model.num_query_groups",
    "--train-weighted-split-paths t": "data.train_weighted_split_paths",
    "--valid-weighted-split-paths t": "data.valid_weighted_split_paths",
    "--test-weighted-split-paths t": "data.test_weighted_split_paths",
    "--fim-rate 0.5": "fim.fim_rate",
    "--lr-decay-tokens 9000": "schedule.lr_decay_tokens",
    "--log-level warning": "log.logging_level",
    "--codecarbon-dir c": "neither power nor emissions are measured",
    "--rotary-interleaved --position-embedding-type rope": "model.rotary_interleaved",
    "--num-distributed-optimizer-instances 2": "gives the same updates",
}


@pytest.mark.parametrize("name", SCRIPTS.keys() - {*WITH_JSON})
def test_the_flags_of_a_script_are_taken(name):
    config_of(SCRIPTS[name].flags, SCRIPTS[name].ranks)


@pytest.mark.parametrize("line", ASKED)
def test_each_of_them_has_its_effect_or_says_why_not(line, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config, expected = config_of(line, 2), ASKED[line]
    idle = [message for message in caplog.messages if "no effect" in message]
    said = [message for message in idle if line.split()[0] in message]
    section, _, name = expected.partition(".")
    if not hasattr(config, section):
        assert len(said) == 1 and expected in said[0]
        return
    assert not said
    of_none = config_of("", 2)
    values = [getattr(getattr(each, section), name) for each in (config, of_none)]
    assert values[0] != values[1]


@pytest.mark.parametrize("flag", FORKS)
def test_no_flag_of_a_fork_is_unknown(flag):
    beside = ["--pipeline-model-parallel-size", "2"] if "partition" in flag else []
    try:
        parse([flag, *FORKS[flag], *beside], 2)
    except InputError as error:
        assert str(error).startswith(f"{flag} is not available: ")


def test_bloom_has_as_many_blocks_and_embeddings_on_each_rank():
    """70 blocks and 2 embeddings on 12 ranks, as its authors describe them."""
    line = BLOOM.flags.replace("size 4 --pp", "size 12 --pp") + " --num-layers 70"
    parallel = config_of(line, 96).parallel
    assert [len(stage) for stage in parallel.stages(70)] == [5, *[6] * 10, 5]


@pytest.mark.parametrize(
    ("method", "counts"),
    [("uniform", [2, 2, 3, 3]), ("type:Transformer", [2, 2, 3, 3]),
     ("type:transformer|embedding", [2, 3, 3, 2])],
)  # fmt: skip
def test_shares_of_a_pipeline_differ_by_one_at_most(method, counts):
    line = BLOOM.flags.replace("type:transformer|embedding", method)
    assert [len(stage) for stage in config_of(line, 32).parallel.stages(10)] == counts


def test_a_script_of_megatron_deepspeed_with_its_json(tmp_path, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config = config_of(SCRIPTS["gpt3"].flags, 8, GPT3_JSON, tmp_path)
    assert config.schedules.length.iterations == 300_000_000_000 // 2048 // 256
    assert config.precision.initial_loss_scale == 2048 and config.precision.loss_scale_window == 500
    assert config.zero.gradient_accumulation_steps == 8
    assert "by default" not in caplog.text


def test_the_zeropp_tutorial_runs_as_printed(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    config = parse(SCRIPTS["zeropp_tutorial"].flags.split(), 4)
    assert config.model.num_layers == 40 and config.model.num_positions == 512
    assert config.precision.fp16 and config.zero.fp16.enabled and config.zero.stage == 3
    assert config.recompute.recompute_granularity == "full"
    zero = config.zero.zero_optimization
    assert zero.zero_quantized_weights and zero.zero_quantized_gradients
    assert zero.zero_hpz_partition_size == 16


def test_the_offload_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("ds_zero_offload.config")
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    config = parse(OFFLOAD.split(), 2)
    assert config.batch.micro_batch_size == 10 and config.recompute.recompute_method == "uniform"
    path.write_text('{"zero_optimization": {\n  "offload_optimizer": {"device": "cpu",}\n "x": 1}}')
    assert "line 2, column 40" in error_of(OFFLOAD, 2)
