"""The DeepSpeed JSON: keys that are used, keys that have no effect, and values that are refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zeropp.settings.json_sources import error_of, nested
from zeropp.errors import InputError
from zeropp.settings.deepspeed_json import OLD_NAMES, all_keys
from zeropp.settings.json_keys import Key
from zeropp.settings.no_effect_tables import keys_without_effect
from zeropp.settings.rules import RULES
from zeropp.settings.sections import ZeroOptimization
from zeropp.settings.zero_config import ZeroConfig

KEYS = {dotted: entry for dotted, entry in all_keys(ZeroConfig).items() if entry.subsection is None}
ZERO = "zero_optimization."
# Keys of the ZeRO++ tutorial's file, as users have them.
TUTORIAL = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 10000000,
        "reduce_scatter": True,
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 16,
        "zero_quantized_gradients": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    },
    "fp16": {"enabled": True},
}


def values_for(entry: Key) -> st.SearchStrategy:
    """Values a key accepts, as JSON holds them."""
    low = 0 if entry.minimum is None else entry.minimum
    high = 1e9 if entry.maximum is None else entry.maximum
    if entry.choices:
        value = st.sampled_from([c for c in entry.choices if c not in entry.refused])
    elif entry.type is bool:
        value = st.sampled_from([b for b in (False, True) if b not in entry.refused])
    elif entry.type is int:
        value = st.integers(int(low), int(high))
    elif entry.type is float:
        low = low if entry.above is None else entry.above
        high = high if entry.below is None else entry.below
        edges = {"exclude_min": entry.above is not None, "exclude_max": entry.below is not None}
        value = st.floats(low, high, **edges)
    elif entry.type is str:
        value = st.text(max_size=5)
    else:
        inside = {entry.keys[0]: True} if entry.keys else {"enabled": False, "seed": 3}
        value = st.just(inside)
    return value if entry.count is None else st.lists(value, min_size=2, max_size=2)


@st.composite
def accepted(draw: st.DrawFn) -> dict[str, object]:
    """A random subset of all keys with values that do not contradict each other."""
    names = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=12))
    values = {name: draw(values_for(KEYS[name])) for name in names}
    values[ZERO + "stage"] = 3
    for name in ("bf16.enabled", "train_batch_size"):
        values.pop(name, None)
    if values.get("zeropp.weight_steps"):
        values |= {ZERO + "zero_quantized_weights": True, ZERO + "zero_hpz_partition_size": 2}
        values["zeropp.weight_bits"] = 8
    if 3 in values.get("zeropp.gradient_bits", ()):
        values["zeropp.gradient_bits"] = [8, 3]  # only across nodes
    if values.get("zeropp.delayed_param_update"):
        values |= {ZERO + "offload_optimizer.device": "cpu"}
        values.pop("zeropp.sync_every", None)
    if "zeropp.sync_every" in values:
        values.pop("zeropp.sync_delay", None)  # which has to be shorter
    if values.get("zeropp.sync_store") is not None:
        values |= {"zeropp.sync_nodes": 2, "zeropp.sync_delay": 0}
    if values.get(ZERO + "offload_param.device") == "cpu":
        values.pop(ZERO + "zero_quantized_nontrainable_weights", None)
        values |= {ZERO + "offload_optimizer.ratio": 1.0}
    return values


@settings(max_examples=60, deadline=None)
@given(accepted())
def test_any_subset_of_the_known_keys_round_trips(values: dict[str, object]) -> None:
    config = ZeroConfig.from_json(nested(values))
    assert config.file_keys == values.keys()
    for dotted, value in values.items():
        held = config.value(dotted)
        assert (list(held) if isinstance(held, tuple) else held) == value
    assert config.to_dict() == nested(values)
    again = ZeroConfig.from_json(json.dumps(config.to_dict()))
    assert again == config
    text = " ".join(config.notices())
    named = {name for name in KEYS if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text)}
    for dotted in values:
        sections = {dotted.rsplit(".", n)[0] for n in range(dotted.count(".") + 1)}
        assert not KEYS[dotted].why_ignored or sections & named, dotted


def test_no_configuration_is_stage_0_in_fp32() -> None:
    config = ZeroConfig()
    assert config.stage == 0
    assert config.compute_format == config.wire_format == "float32"
    assert config.notices() == () and config.file_keys == frozenset() and config.to_dict() == {}
    assert ZeroConfig.from_json("{}") == config


def test_the_tutorials_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ds_zeropp_config.json"
    path.write_text(json.dumps(TUTORIAL))
    config = ZeroConfig.from_json(path)
    assert (config.stage, config.zero_optimization.zero_hpz_partition_size) == (3, 16)
    assert config.compute_format == "float16"
    assert config.auto_keys == {"train_micro_batch_size_per_gpu"}
    (line,) = config.notices()
    keys = f"{ZERO}reduce_bucket_size, {ZERO}contiguous_gradients"
    assert line.startswith(f"no effect here: {keys} (FSDP2 gathers and reduces block by block")
    assert line.count(" (") == 3 and f"; {ZERO}overlap_comm (communication overlaps" in line


@pytest.mark.parametrize(
    "values",
    [
        {"fp16.enabled": True, "bf16.enabled": True},
        {ZERO + "zero_hpz_partition_size": 2, ZERO + "stage": 2},
        {ZERO + "zero_quantized_weights": True, ZERO + "stage": 0},
        {ZERO + "zero_quantized_gradients": True, ZERO + "stage": 0},
        {ZERO + "zero_quantized_nontrainable_weights": True, ZERO + "stage": 0},
        {ZERO + "offload_optimizer.device": "cpu", ZERO + "stage": 0},
        {"zeropp.sync_delay": 3, "zeropp.sync_every": 3},
        {"zeropp.sync_store": "host:29400", "zeropp.sync_nodes": None},
        {"zeropp.sync_store": "host:29400", "zeropp.sync_delay": 1},
        {"zeropp.sync_delay": 2, "zeropp.sync_every": {"0": 1, "9": 2, "20": 5}},
        {"zeropp.delayed_param_update": True, "zeropp.sync_every": {"0": 1, "9": 2}},
        {"zeropp.delayed_param_update": True, ZERO + "offload_optimizer.device": "none"},
        {
            "train_batch_size": 9,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
    ],
)
def test_settings_that_contradict_each_other_are_both_named(values: dict) -> None:
    message = error_of(nested(values))
    for dotted, value in values.items():
        assert f"{dotted} = {json.dumps(value)}" in message
    assert set(values) in [set(rule.names) for rule in RULES]


def test_defaults_fill_what_the_file_leaves_out_or_to_auto() -> None:
    config = ZeroConfig.from_json(
        {"gradient_clipping": 0.5, "train_batch_size": "auto", "fp16": {"enabled": "auto"}},
        {ZERO + "stage": 2, "gradient_clipping": 1.0, "train_batch_size": 8, "bf16.enabled": None},
    )
    assert (config.stage, config.gradient_clipping, config.train_batch_size) == (2, 0.5, 8)
    assert config.file_keys == {"gradient_clipping"}
    assert config.auto_keys == {"fp16.enabled"}
    with pytest.raises(InputError, match="nearest known key"):
        ZeroConfig.from_json({}, {"fp16.enable": True})


def test_a_default_makes_a_file_without_a_stage_valid() -> None:
    source = {"zero_optimization": {"zero_quantized_weights": True}}
    assert "stage = 0" in error_of(source)
    assert ZeroConfig.from_json(source, {ZERO + "stage": 3}).stage == 3


def test_changed_copies_are_checked_too() -> None:
    config = ZeroConfig(zero_optimization=ZeroOptimization(stage=3))
    assert replace(config, gradient_clipping=1.0).stage == 3
    with pytest.raises(InputError, match="stage = 9"):
        replace(config.zero_optimization, stage=9)
    with pytest.raises(InputError, match="gradient_clipping = true"):
        ZeroConfig(gradient_clipping=True)
    with pytest.raises(InputError, match="zero_optimization = .* an object"):
        ZeroConfig(zero_optimization={"stage": 3})
    with pytest.raises(InputError, match="zero_hpz_partition_size = 2 and .*stage = 0"):
        ZeroConfig(zero_optimization=ZeroOptimization(zero_hpz_partition_size=2))


def test_settings_of_a_disabled_feature_are_reported_to_have_no_effect() -> None:
    off = ZeroConfig.from_json({"zeropp": {"weight_bits": 4}})
    assert off.notices() == (
        "zeropp.weight_bits has no effect here: it needs zero_optimization.zero_quantized_weights",
    )
    on = {ZERO + "stage": 3, ZERO + "zero_quantized_weights": True, "zeropp.weight_bits": 4}
    assert ZeroConfig.from_json(nested(on)).notices() == ()
    once = nested({ZERO + "stage": 1, "zeropp.reduce_gradients_once": True})
    assert "stages 0 and 1 do so anyway" in " ".join(ZeroConfig.from_json(once).notices())


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (32, 2, 4, 4, (32, 2, 4)),
        (32, 2, None, 4, (32, 2, 4)),
        (32, None, 4, 4, (32, 2, 4)),
        (None, 2, 4, 4, (32, 2, 4)),
        (32, None, None, 4, (32, 8, 1)),
        (None, 2, None, 4, (8, 2, 1)),
    ],
)
def test_batch_sizes_complete_each_other(
    train: int, micro: int, steps: int, world: int, expected: tuple
) -> None:
    config = ZeroConfig(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    assert config.resolve_batch(world) == expected


@pytest.mark.parametrize(
    ("train", "micro", "steps", "words"),
    [
        (32, 2, 8, "exactly 64 (train_micro_batch_size_per_gpu = 2 x gradient_accumulation_steps"),
        (34, 2, None, "a multiple of 8 (train_micro_batch_size_per_gpu = 2 x 4 ranks)"),
        (34, None, None, "a multiple of 4 (4 ranks)"),
        (2, None, 1, "a multiple of 4 (gradient_accumulation_steps = 1 x 4 ranks)"),
        (None, None, 4, "give train_batch_size or"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_named_with_numbers(
    train: int, micro: int, steps: int, words: str
) -> None:
    config = ZeroConfig(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )
    with pytest.raises(InputError, match=re.escape(words)):
        config.resolve_batch(4)


@pytest.mark.parametrize(
    ("values", "compute", "wire"),
    [
        ({}, "float32", "float32"),
        ({"bf16.enabled": True}, "bfloat16", "bfloat16"),
        ({"fp16.enabled": True}, "float16", "float16"),
        ({"fp16.enabled": True, "communication_data_type": "fp32"}, "float16", "float32"),
        ({"communication_data_type": "bfp16"}, "float32", "bfloat16"),
    ],
)
def test_formats_on_the_wire(values: dict, compute: str, wire: str) -> None:
    config = ZeroConfig.from_json(nested(values))
    assert (config.compute_format, config.wire_format) == (compute, wire)


def test_every_key_says_what_it_does_and_its_default_is_acceptable() -> None:
    for dotted, entry in KEYS.items():
        if dotted not in keys_without_effect():
            entry.check(entry.default)
        assert len(entry.no_effect) <= 1, entry.dotted
        for reason in entry.no_effect:
            assert reason.why[-1] != "." and len(reason.why) > 10, entry.dotted
            if reason.when is not None:
                assert reason.when(ZeroConfig()), entry.dotted  # the key it needs exists
    for old, (names, _) in OLD_NAMES.items():
        keys = all_keys(ZeroConfig).keys()
        assert old not in keys and set(names) <= keys


def test_no_key_is_honoured_and_said_to_change_nothing() -> None:
    honoured = {name for name, entry in KEYS.items() if name not in keys_without_effect()}
    assert len(honoured) > 40 and len(keys_without_effect()) > 80
    for name in honoured:
        ZeroConfig().value(name)  # is a field
        assert not KEYS[name].why_ignored
    for name, entry in keys_without_effect().items():
        *sections, last = name.split(".")
        held = ZeroConfig()
        for section in sections:
            held = getattr(held, section, None)
        assert not hasattr(held, last), name
        assert entry.subsection or entry.why_ignored or entry.why_no_others, name


@pytest.mark.parametrize(("stage", "lines"), [(0, 1), (1, 0)])
def test_stage_0_reports_its_fixed_communication_type(stage: int, lines: int) -> None:
    values = {"communication_data_type": "bf16", "zero_optimization": {"stage": stage}}
    notices = ZeroConfig.from_json(values).notices()
    assert len([line for line in notices if "fp32" in line]) == lines


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"}}, "curriculum"),
        ({"data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}}, "curriculum"),
        ({"compression_training": {"layer_reduction": {"enabled": False}}}, "compression during"),
        ({"progressive_layer_drop": {"enabled": False, "theta": 0.5}}, "layer dropping"),
        ({"elasticity": {"enabled": False}}, "batch sizes"),
        ({"amp": {"enabled": False, "opt_level": "O1"}}, "bf16 and fp16"),
        ({"autotuning": {"enabled": True, "fast": False}}, "autotuning is not"),
        ({"nebula": {"enabled": True, "load_path": "p"}}, "checkpoints are written"),
        ({"hybrid_engine": {"enabled": True}}, "one engine"),
        ({"sparse_attention": {"mode": "fixed"}}, "the model defines"),
        ({"aio": {"block_size": 1048576}}, "NVMe"),
        ({"flops_profiler": {"enabled": True, "detailed": False}}, "not profiled"),
        ({"comms_logger": {"enabled": True}}, "own settings"),
    ],
)
def test_an_idle_object_gets_its_line(section: dict, words: str) -> None:
    (line,) = ZeroConfig.from_json(section).notices()
    (name,) = section
    assert line.startswith(f"{name} has no effect here: ") and words in line


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"data_efficiency": {"enabled": True, "seed": 1}}, "data_efficiency.enabled"),
        ({"amp": {"enabled": True}}, "amp.enabled"),
        ({"elasticity": {"enabled": True}}, "elasticity.enabled"),
        (
            {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training.sparse_pruning.shared_parameters.enabled",
        ),
    ],
)
def test_what_is_switched_on_and_not_here_is_an_error(section: dict, key: str) -> None:
    message = error_of(section)
    assert f"{key} = true: " in message and "set it to false" in message


def test_an_idle_objects_switch_is_a_boolean() -> None:
    assert "expected true or false" in error_of({"curriculum_learning": {"enabled": "yes"}})
