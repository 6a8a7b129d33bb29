"""The sections: one flag a field, derived values, and what each refuses on its own."""

import dataclasses

import pytest

from megatron_zpp.settings.arguments import FLAG_SECTIONS
from megatron_zpp.settings.config import (
    SECTIONS,
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron_zpp.settings.flag import Flag, Section, flag
from zeropp.errors import InputError
from zeropp.settings.schema import settings_of


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


def test_sections_are_frozen_and_built_by_keyword():
    for section in SECTIONS.values():
        instance = section()
        name = dataclasses.fields(section)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, name, None)
        with pytest.raises(TypeError):
            section(1)


def test_defaults_pass_their_own_checks():
    for section in SECTIONS.values():
        section().check()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(Section):
    size: int = flag(1, "a size", minimum=1, maximum=8)
    share: float = flag(0.5, "a share", above=0)
    colour: str = flag("red", "a colour", choices=("red", "blue"))
    fast: bool = flag(True, "slow", shorthands={"no-fast": False})
    triple: tuple[int, int, int] | None = flag(None, "three", minimum=0)


def test_flags_describe_fields():
    described = {item.name: item for item in settings_of(Sample)}
    assert described["size"] == Flag(
        name="size", section=Sample, type=int, count=None, optional=False, default=1,
        help="a size", minimum=1, maximum=8,
    )  # fmt: skip
    assert described["size"].names == ("size",)
    assert (described["triple"].count, described["triple"].optional) == (3, True)
    assert described["fast"].names == () and described["fast"].shown == "--no-fast"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "--size 0: expected at least 1"),
        ({"size": 9}, "--size 9: expected at most 8"),
        ({"share": 0.0}, "--share 0: expected more than 0"),
        ({"share": float("nan")}, "--share nan: expected a finite number"),
        ({"share": float("inf")}, "--share inf: expected a finite number"),
        ({"size": "two"}, "--size two: expected a whole number from 1 to 8"),
        ({"size": True}, "--size True: expected a whole number from 1 to 8"),
        ({"colour": "green"}, "--colour green: expected one of red, blue"),
        ({"triple": (1, -2, 3)}, "--triple -2: expected at least 0"),
    ],
)
def test_values_out_of_range_are_named(values, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Sample(**values).check()
    Sample().check()


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        (ModelConfig, {"hidden_size": 100, "num_attention_heads": 3}, ["100", "3", "divisible"]),
        (ModelConfig, {"num_query_groups": 3}, ["--num-attention-heads 4", "groups 3"]),
        (ModelConfig, {"seq_length": 9, "max_position_embeddings": 8}, ["--seq-length 9", "8"]),
        (ModelConfig, {"swiglu": True, "squared_relu": True}, ["--swiglu and --squared-relu"]),
        (ModelConfig, {"num_layers": 0}, ["--num-layers 0"]),
        (
            ModelConfig,
            {"position_embedding_type": "rope", "kv_channels": 3},
            ["3 channels", "--rotary-percent 1"],
        ),
        (DataConfig, {"data_path": ("a",), "valid_data_path": ("b",)}, ["--data-path", "--valid"]),
        (DataConfig, {"data_path": ("a",), "mock_data": True}, ["--mock-data and --data-path"]),
        (DataConfig, {"train_data_path": ("a",), "mock_data": True}, ["--train-data-path"]),
        (DataConfig, {"data_path": ("a",), "data_args_path": "f"}, ["--data-path and --data-args"]),
        (
            DataConfig,
            {"per_split_data_args_path": "f", "train_weighted_split_paths": ("g",)},
            ["--per-split-data-args-path and --train-weighted-split-paths"],
        ),
        (
            DataConfig,
            {"test_weighted_split_paths": ("g",), "test_weighted_split_paths_path": "f"},
            ["--test-weighted-split-paths g and --test-weighted-split-paths-path f contradict"],
        ),
        (DataConfig, {"split_ranges": ("0:1", "0:1", "1:0.5")}, ["1:0.5 is no FROM:TO"]),
        (
            DataConfig,
            {"split_ranges": ("0:1",) * 3, "train_data_path": ("a.jsonl",)},
            ["examples have no ranges"],
        ),
        (TrainingConfig, {"manual_gc_interval": -1}, ["--manual-gc-interval -1: expected"]),
        (OptimizerConfig, {"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3}, ["decoupled-min-lr"]),
        (OptimizerConfig, {"decoupled_lr": 1e-4, "min_lr": 2e-4}, ["--min-lr 0.0002 is larger"]),
        (
            ScheduleConfig,
            {"decoupled_lr": 1e-5, "lr_warmup_init": 1e-4},
            ["--lr-warmup-init 0.0001 is above --decoupled-lr"],
        ),
        (BatchConfig, {"rampup_batch_size": (2, 2, 9)}, ["needs --global-batch-size"]),
        (BatchConfig, {"rampup_batch_size": (0, 2, 9), "global_batch_size": 8}, ["at least 1"]),
        (BatchConfig, {"rampup_batch_size": (2, 0, 9), "global_batch_size": 8}, ["at least 1"]),
        (
            BatchConfig,
            {"rampup_batch_size": (9, 2, 9), "global_batch_size": 8},
            ["start", "size 8"],
        ),
        (BatchConfig, {"rampup_batch_size": (2, 4, 9), "global_batch_size": 8}, ["never reach"]),
        (ParallelConfig, {"cp_comm_type": "p2p"}, ["--cp-comm-type p2p: not available: allgather"]),
        (ParallelConfig, {"num_layers_per_virtual_pipeline_stage": 1}, ["virtual-pipeline-stage"]),
        (
            RecomputeConfig,
            {"recompute_method": "block"},
            ["--recompute-method block needs --recompute-granularity full"],
        ),
        (
            RecomputeConfig,
            {"recompute_method": "uniform", "recompute_granularity": "selective"},
            ["--recompute-method uniform needs --recompute-granularity full"],
        ),
        (PrecisionConfig, {"fp16": True, "bf16": True}, ["--fp16 and --bf16"]),
        (PrecisionConfig, {"initial_loss_scale": 1.0, "min_loss_scale": 2.0}, ["below", "2"]),
        (OptimizerConfig, {"lr": 0.1, "min_lr": 0.2}, ["--min-lr 0.2", "--lr 0.1"]),
        (OptimizerConfig, {"adam_beta2": 1.0}, ["--adam-beta2 1"]),
        (OptimizerConfig, {"end_weight_decay": 0.5}, ["--weight-decay-incr-style"]),
        (OptimizerConfig, {"weight_decay_incr_style": "linear"}, ["linear needs both"]),
        (
            OptimizerConfig,
            {
                "weight_decay_incr_style": "cosine",
                "start_weight_decay": 0.2,
                "end_weight_decay": 0.1,
            },
            ["--start-weight-decay 0.2", "0.1"],
        ),
        (ScheduleConfig, {"lr_decay_iters": 5, "lr_decay_samples": 6}, ["iters 5", "samples 6"]),
        (ScheduleConfig, {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 6}, ["fraction", "iters"]),
        (ScheduleConfig, {"lr_decay_style": "WSD"}, ["WSD needs --lr-wsd-decay-iters"]),
        (ScheduleConfig, {"lr_warmup_init": 1.0}, ["--lr-warmup-init 1"]),
        (
            ScheduleConfig,
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            ["contradict"],
        ),
        (TrainingConfig, {"train_iters": 5, "train_samples": 6}, ["--train-iters 5", "samples 6"]),
        (TrainingConfig, {"train_iters": 0}, ["--train-iters 0"]),
        (CheckpointConfig, {"exit_on_missing_checkpoint": True}, ["needs --load"]),
        (CheckpointConfig, {"use_checkpoint_args": True}, ["--use-checkpoint-args needs --load"]),
    ],
)
def test_sections_refuse_what_does_not_fit(section, values, named):
    with pytest.raises(InputError) as caught:
        section(**values).check()
    for words in named:
        assert words in str(caught.value)


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


def test_a_whole_configuration_of_defaults():
    assert Config().zero.stage == 0
    assert Config() == Config()
