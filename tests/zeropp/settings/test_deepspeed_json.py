"""Reading a DeepSpeed JSON: every mistake is named with its place."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.zeropp.settings.json_sources import error_of, nested
from zeropp.settings.deepspeed_json import OLD_NAMES, all_keys
from zeropp.settings.zero_config import ZeroConfig

KEYS = {dotted: entry for dotted, entry in all_keys(ZeroConfig).items() if entry.subsection is None}
ZERO = "zero_optimization."
STEPS = {"weight_steps": True}
BOTH = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2}


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_misspelt_key_is_refused_and_a_real_one_suggested(data: st.DataObject) -> None:
    dotted = data.draw(st.sampled_from(sorted(KEYS)))
    section, _, name = dotted.rpartition(".")
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("abcxyz_"))
    wrong = data.draw(
        st.sampled_from([name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name + letter])
    )
    full = f"{section}.{wrong}".lstrip(".")
    if full in all_keys(ZeroConfig).keys() or full in OLD_NAMES:
        return
    message = error_of(nested({full: 1}))
    assert f'unknown key "{full}"' in message
    suggested = re.search(r'nearest known key is "([^"]+)"', message).group(1)
    if len(name) > 6:
        assert suggested.rpartition(".")[0] == section or suggested.endswith("." + wrong)
    assert suggested in all_keys(ZeroConfig).keys() | set(OLD_NAMES)


@pytest.mark.parametrize(
    ("text", "place", "line", "caret", "what"),
    [
        # The ZeRO-Offload tutorial's mistakes: a comma too many, then one too few.
        (
            '{\n  "zero_optimization": {\n    "stage": 2,\n    "offload_optimizer": {\n'
            '      "device": "cpu",\n    }\n    "contiguous_gradients": true,\n'
            '    "overlap_comm": true\n  }\n}',
            "line 5, column 22",
            '      "device": "cpu",',
            21,
            'a comma before "}"',
        ),
        (
            '{\n  "zero_optimization": {\n    "stage": 2,\n    "offload_optimizer": {\n'
            '      "device": "cpu"\n    }\n    "contiguous_gradients": true\n  }\n}',
            "line 7, column 5",
            '    "contiguous_gradients": true',
            4,
            "a comma is missing before this",
        ),
        ('{"a": [1, 2,]}', "line 1, column 12", '{"a": [1, 2,]}', 11, 'a comma before "]"'),
        ('{"fp16": {}', "line 1, column 12", '{"fp16": {}', 11, "ends before its last brace"),
        ("{'fp16': 1}", "line 1, column 2", "{'fp16': 1}", 1, "double quotes"),
        ('{"fp16": {} // x', "line 1, column 13", '{"fp16": {} // x', 12, "no comments"),
        ('{"a": "x\ny"}', "line 1, column 9", '{"a": "x', 8, "ends on the line it begins on"),
        ('{"a": "x}', "line 1, column 7", '{"a": "x}', 6, "unterminated string"),
        ('{"a": tru}', "line 1, column 7", '{"a": tru}', 6, "expecting value"),
    ],
)
def test_text_that_is_not_json_is_shown_with_its_place(
    tmp_path: Path, text: str, place: str, line: str, caret: int, what: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    first, shown, mark = error_of(path).split("\n")
    assert first.startswith(f"{path}, {place}: not valid JSON: ") and what in first
    assert shown == "    " + line
    assert mark == "    " + " " * caret + "^"


def test_one_long_line_is_shown_around_the_mistake() -> None:
    text = '{"fp16": {"enabled": true' + " " * 300 + '"hysteresis": 2' + " " * 300 + "}}"
    first, shown, mark = error_of(text).split("\n")
    assert "column 326" in first
    assert len(shown) < 140 and shown[mark.index("^")] == '"'


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ('{"fp16": {"enabled": true, "enabled": false}}', ['"fp16.enabled" is given twice']),
        ('{"fp16": {}, "fp16": {}}', ['"fp16" is given twice']),
        ('{"fp16": {"loss_scale": NaN}}', ["NaN is not a JSON value"]),
        ('{"fp16": {"loss_scale": 1e999}}', ["fp16.loss_scale = Infinity", "a finite number"]),
        ("[1]", ["the top level", "expected an object"]),
        ("[" * 100_000, ["nested too deeply"]),
        ({"stage": 3}, ['"stage"', '"zero_optimization.stage"']),
        ({"fp17": {}}, ['"fp17"', '"fp16"']),
        ({"fp16.enabled": True}, ['unknown key "fp16.enabled"']),
        ({1: 2}, ['unknown key "1"']),
        ({"tensorboard": {"enable": True}}, ['"tensorboard.enable"', '"tensorboard.enabled"']),
        ({"tensorboard": {"enabled": 2}}, ["tensorboard.enabled = 2", "true or false"]),
        ({"zero_optimization": {"prefetch_buckets": 1}}, ["prefetch_bucket_size"]),
        ({"zero_optimization": {"overlap_comm": 2}}, ["overlap_comm = 2", "true or false or null"]),
        ({"zero_optimization": {"sub_group_size": None}}, ["sub_group_size = null"]),
        ({"zero_optimization": {"reduce_scatter": "auto"}}, ['reduce_scatter = "auto"']),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, ['a whole number or "auto"']),
        ({"activation_checkpointing": 3}, ["activation_checkpointing is 3", "an object"]),
        ({"activation_checkpointing": {"number_checkpoints": 0}}, ["at least 1"]),
        ({"wandb": 1}, ["wandb = 1", "an object or null"]),
        ({"zero_optimization": True}, ["zero_optimization is true", "an object"]),
        ({"zero_optimization": {"stage": True}}, ["stage = true", "one of 0, 1, 2, 3"]),
        ({"zero_optimization": {"stage": 4}}, ["stage = 4", "one of 0, 1, 2, 3"]),
        ({"zero_optimization": {"stage": "3"}}, ['stage = "3"']),
        ({"zero_optimization": {"stage": "auto"}}, ['stage = "auto"', "one of 0, 1, 2, 3"]),
        ({"zero_optimization": {"stage": 3.5}}, ["stage = 3.5"]),
        ({"zero_optimization": {"stage": None}}, ["stage = null"]),
        ({"fp16": {"enabled": 1.0}}, ["fp16.enabled = 1.0", "true or false"]),
        ({"fp16": {"loss_scale": "big"}}, ['fp16.loss_scale = "big"', "a number"]),
        ({"fp16": {"hysteresis": 0}}, ["fp16.hysteresis = 0", "at least 1"]),
        ({"gradient_clipping": -1}, ["gradient_clipping = -1", "at least 0"]),
        ({"train_batch_size": 0}, ["train_batch_size = 0", "at least 1"]),
        ({"communication_data_type": "int8"}, ['communication_data_type = "int8"', '"bf16"']),
        ({"optimizer": {"type": "Lamb"}}, ['optimizer.type = "Lamb"', '"AdamW"']),
        ({"optimizer": {"params": {"betas": [0.9]}}}, ["optimizer.params.betas", "two values"]),
        ({"optimizer": {"params": {"betas": [0.9, 2]}}}, ["betas = 2", "at most 1"]),
        ({"optimizer": {"params": {"amsgrad": True}}}, ["AMSGrad is not available"]),
        ({"scheduler": {"type": "Cyclic"}}, ['scheduler.type = "Cyclic"', '"WarmupLR"']),
        ({"zeropp": {"gradient_bits": 5}}, ["zeropp.gradient_bits = 5", "one of 3, 4, 8, 16"]),
        ({"zeropp": {"gradient_bits": [8, 2]}}, ["gradient_bits = 2", "one of 3, 4, 8, 16"]),
        ({"zeropp": {"weight_bits": 3}}, ["zeropp.weight_bits = 3", "one of 4, 8, 16"]),
        ({"zeropp": {"weight_bits": 7}}, ["zeropp.weight_bits = 7", "one of 4, 8, 16"]),
        ({"zeropp": {"ranks_per_node": 0}}, ["zeropp.ranks_per_node = 0", "at least 1"]),
        ({ZERO[:-1]: {"zero_hpz_partition_size": 0}}, ["zero_hpz_partition_size = 0"]),
        ({ZERO[:-1]: {"mics_shard_size": 2}}, ["mics_shard_size = 2"]),
        (
            {ZERO[:-1]: {"stage": 3, "zero_hpz_partition_size": 2}, "zeropp": STEPS},
            ["weight_steps = true and", ".zero_quantized_weights = false: incremental updates"],
        ),
        (
            {ZERO[:-1]: {"stage": 3, "zero_quantized_weights": True}, "zeropp": STEPS},
            ["zero_hpz_partition_size = 1: incremental updates change the copies"],
        ),
        (
            {ZERO[:-1]: BOTH, "zeropp": STEPS | {"weight_bits": 4}},
            ["zeropp.weight_bits = 4: incremental updates change INT8 codes"],
        ),
        (
            {ZERO[:-1]: BOTH, "zeropp": STEPS | {"code_messages": 2}},
            ["code_messages = 2: expected true or false or null"],
        ),
        (
            {ZERO[:-1]: {"stage": 3, "offload_param": {"device": "nvme"}}},
            ['offload_param.device = "nvme"', '"cpu" and "none" are'],
        ),
        (
            {ZERO[:-1]: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
            ["offload_optimizer.ratio = 1.5", "at most 1"],
        ),
        (
            {ZERO[:-1]: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            ["cpu_offload = true is the old name", "offload_optimizer.device"],
        ),
        ({ZERO[:-1]: {"cpu_offload": 2}}, ["cpu_offload = 2", "true or false"]),
    ],
)
def test_bad_input_is_named(source: object, parts: list[str]) -> None:
    message = error_of(source)
    for part in parts:
        assert part in message, message


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert "none.json: No such file" in error_of(tmp_path / "none.json")
    assert "Is a directory" in error_of(str(tmp_path))
    path = tmp_path / "ds.json"
    path.write_bytes(b'{"fp16": "\xff"}')
    assert "not UTF-8" in error_of(path)
    path.write_text(" \n")
    assert "the file is empty" in error_of(path)
    path.write_bytes(b"\xef\xbb\xbf{}")
    assert ZeroConfig.from_json(path) == ZeroConfig()
    path.write_text('{"bf17": {}}')
    assert error_of(path).startswith(f"{path}: unknown key")


def test_numbers_and_names_may_be_spelt_as_deepspeed_allows() -> None:
    config = ZeroConfig.from_json(
        '{"zero_optimization": {"reduce_bucket_size": 5e8}, "optimizer": {"type": "adamw",'
        ' "params": {"betas": [0, 0.95]}}, "zeropp": {"gradient_bits": 4}, "gradient_clipping": 1}'
    )
    size = config.value(ZERO + "reduce_bucket_size")
    assert size == 500_000_000 and type(size) is int
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.params.betas == (0.0, 0.95)
    assert config.zeropp.gradient_bits == (4, 4)
    assert type(config.gradient_clipping) is float


@pytest.mark.parametrize(
    ("old", "value", "expected"),
    [
        ("cpu_offload", True, {"offload_optimizer.device": "cpu"}),
        ("cpu_offload", False, {"offload_optimizer.device": "none"}),
        ("cpu_offload_param", True, {"offload_param.device": "cpu"}),
        (
            "cpu_offload_use_pin_memory",
            True,
            {"offload_optimizer.pin_memory": True, "offload_param.pin_memory": True},
        ),
        (
            "stage3_gather_fp16_weights_on_model_save",
            True,
            {"stage3_gather_16bit_weights_on_model_save": True},
        ),
    ],
)
def test_old_names_are_translated_with_a_notice(old: str, value: bool, expected: dict) -> None:
    config = ZeroConfig.from_json(nested({ZERO + "stage": 3, ZERO + old: value}))
    for dotted, new in expected.items():
        assert config.value(ZERO + dotted) == new
        assert ZERO + dotted in config.file_keys
    assert any(f"{ZERO}{old} is an old name of" in line for line in config.notices())


def test_old_section_names_keep_auto() -> None:
    config = ZeroConfig.from_json({"bfloat16": {"enabled": "auto"}})
    assert config.auto_keys == {"bf16.enabled"} and not config.bf16.enabled


def test_0_and_1_stand_for_false_and_true() -> None:
    for value in (False, True):
        numbers, booleans = (
            {
                "zero_allow_untested_optimizer": each,
                "fp16": {"enabled": each},
                "flops_profiler": {"enabled": each},
                "zero_optimization": {"stage": 2, "cpu_offload": each},
            }
            for each in (int(value), value)
        )
        assert ZeroConfig.from_json(numbers) == ZeroConfig.from_json(booleans)
    assert "curriculum_learning.enabled = true" in error_of({"curriculum_learning": {"enabled": 1}})
