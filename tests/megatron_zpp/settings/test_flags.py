"""Flags: the settings that they fill, also beside a JSON, what has no effect, and the help."""

import dataclasses
import inspect
import json
import logging
import re
from pathlib import Path

import pytest

from megatron_zpp.settings.arguments import FLAG_SECTIONS, FLAGS, parse
from megatron_zpp.settings.config import (
    SECTIONS,
    Config,
    ModelConfig,
    PrecisionConfig,
)
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.settings.run_help import FIRST, TOPICS
from tests.megatron_zpp.settings.command_lines import config_of, value_at
from tests.megatron_zpp.settings.tables import rows
from zeropp.errors import InputError
from zeropp.settings.no_effect_tables import tomllib
from zeropp.settings.schema import settings_of
from zeropp.settings.zero_config import ZeroConfig

VALUES = [tuple(row.values()) for row in rows("flag_values.tsv")]

# Settings without effect beside others, and beside others that give them one.
PAIRS = [tuple(row.values()) for row in rows("without_effect.tsv")]


@pytest.mark.parametrize(("typed", "setting", "value", "file"), VALUES)
def test_a_flag_fills_its_setting_in_every_spelling(typed, setting, value, file):
    """Or a key of the JSON does."""
    words = typed.split()
    other = [w.replace("-", "_").replace("__", "--", 1) if w[:2] == "--" else w for w in words]
    dashes = [w.replace("_", "-") if w[:2] == "--" else w for w in words]
    num_ranks = 2 if {"--sequence-parallel", "--pipeline-model-parallel-size"} & {*words} else 1
    beside = ["--deepspeed_config", file] if file else []
    for spelled in (words, other, dashes):
        assert value_at(parse(spelled + beside, num_ranks), setting) == json.loads(value), spelled


def test_every_flag_is_covered():
    """A field added to a section without a row in the table fails here."""
    lines = [typed for typed, *_ in VALUES] + [each for row in PAIRS for each in row]
    tried = {word.partition("=")[0].replace("_", "-") for line in lines for word in line.split()}
    ours = {"--eval-at-start", "--deepspeed-config", "--cpu-optimizer", "--no-position-embedding"}
    ours |= {"--dry-run", "--dry-run-ranks", "--remote-device", "--use-pin-memory"}
    ours |= {"--rehearse-ranks"}
    idle = {flag.shown.replace("_", "-") for flag in flags_without_effect()}
    for each in FLAGS:
        spelled = {f"--{name}".replace("_", "-") for name in [*each.names, *each.shorthands]}
        assert spelled & (tried | ours | idle), each.name


def test_every_row_of_a_table_describes_a_flag():
    folder, names = Path(inspect.getfile(Config)).parent, {each.name for each in FLAGS}
    others = ("no_effect.toml", "json_no_effect.toml", "refused.toml")
    tables = [path for path in folder.rglob("*.toml") if path.name not in others]
    tables += (folder.parent / "capabilities").rglob("*flags.toml")
    described = [row for path in tables for row in tomllib.loads(path.read_text())]
    assert len(described) > 200 and {*described} <= names


def notices(line: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.INFO, "megatron_zpp")
    caplog.clear()
    config_of(line)
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "has no effect here" in message]


@pytest.mark.parametrize(("setting", "without", "with_effect"), PAIRS)
def test_it_says_so_where_it_has_no_effect(setting, without, with_effect, caplog):
    (message,) = notices(f"{setting} {without}", caplog)
    assert message.startswith(setting)
    assert notices(f"{setting} {with_effect}", caplog) == []


def test_every_reason_reads_and_every_condition_takes_a_configuration():
    conditions = 0
    for each in FLAGS:
        for reason in each.no_effect:
            assert len(reason.why) > 10 and reason.why[-1] != ".", each.name
            if reason.when is not None:
                conditions += 1
                assert reason.when(Config()) in (True, False), each.name
    assert conditions > 50


def test_flags_with_the_same_meaning_as_a_key_translate_its_default_there_and_back():
    for each in FLAGS:
        if each.same_as is None or each.same_as.index is not None:
            continue
        default = ZeroConfig().value(each.same_as.key)
        if default is None or each.same_as.to_json(each.same_as.flag_value(default)) is None:
            continue
        assert each.same_as.to_json(each.same_as.flag_value(default)) == default, each.name


def test_no_bias_gelu_fusion_says_that_it_changes_numerics(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    config_of("--no-bias-gelu-fusion")
    assert "--no-bias-gelu-fusion: the exact (erf) GELU" in caplog.text


def test_the_same_setting_given_twice(caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    assert config_of("--batch-size 2 --micro-batch-size 2").batch.micro_batch_size == 2
    assert "twice" not in caplog.text
    config = config_of("--lr 1e-3 --lr 1e-4 --seed 1 --seed 2 --seed 3")
    assert (config.optimizer.lr, config.training.seed) == (1e-4, 3)
    assert "given twice, the last is used: --lr 0.0001, --seed 3\n" in caplog.text


def test_every_field_of_every_section_has_a_flag():
    for section in SECTIONS.values():
        fields = [item.name for item in dataclasses.fields(section)]
        assert [described.name for described in settings_of(section)] == fields


def test_a_name_belongs_to_one_setting():
    owners: dict[str, str] = {}
    for section in FLAG_SECTIONS:
        for described in settings_of(section):
            for name in [*described.names, *described.shorthands]:
                assert owners.setdefault(name, described.name) == described.name, name


def test_derived_sizes_of_the_model():
    model = ModelConfig(hidden_size=192, num_attention_heads=6)
    assert (model.ffn_size, model.head_dim, model.kv_heads) == (768, 32, 6)
    assert model.num_positions == model.seq_length
    assert [model.padded_vocab_size(size) for size in (1, 128, 129)] == [128, 128, 256]
    padded = ModelConfig(make_vocab_size_divisible_by=250880, pad_vocab_size_to=250880)
    assert [padded.padded_vocab_size(size) for size in (1, 250880)] == [250880] * 2
    with pytest.raises(InputError, match="--pad-vocab-size-to 250880 is less than the 250881"):
        padded.padded_vocab_size(250881)
    # Megatron: int(8h/3/64)*64; 8*192/3 = 512, 8*200/3 = 533.3.
    assert ModelConfig(hidden_size=192, swiglu=True).ffn_size == 512
    assert ModelConfig(hidden_size=200, swiglu=True).ffn_size == 512
    assert ModelConfig(ffn_hidden_size=100, swiglu=True).ffn_size == 100
    assert ModelConfig(kv_channels=48, num_query_groups=2).head_dim == 48
    assert ModelConfig(num_query_groups=2).kv_heads == 2


def test_format():
    assert PrecisionConfig().format == "float32"
    assert PrecisionConfig(fp16=True).format == "float16"
    assert PrecisionConfig(bf16=True).format == "bfloat16"


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


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(["--num-layers", "x", "--help", *words], 1)
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    return shown


def test_help_begins_with_twenty_flags_and_the_sections(capsys):
    shown = help_of(capsys)
    assert len(FIRST) == 20
    assert re.findall(r"^  --([a-z0-9-]+)", shown, re.M) == list(FIRST)
    assert all(f"\n  {name} " in shown for name in TOPICS)
    assert len(shown.splitlines()) <= 60


def test_help_all_lists_every_flag_with_a_readable_default(capsys):
    shown = help_of(capsys, "all")
    assert all(flag.shown in shown for flag in FLAGS)
    assert "write a trace (default 0)" in shown and "(default (" not in shown


def test_help_of_a_section_is_about_its_flags_alone(capsys):
    shown = help_of(capsys, "checkpoint", "--seed", "1")
    assert "--save-retain-interval" in shown and "--num-layers" not in shown
    assert "--transformer-impl" in help_of(capsys, "no-effect")
    with pytest.raises(InputError, match="--help checkpoints: did you mean checkpoint[?] expected"):
        parse(["--help", "checkpoints"], 1)


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
