"""Adapters of experts in PEFT's files: all families out, all that PEFT trains in, bad files."""

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_zpp.interchange.adapters.peft_config import CONFIG, TENSORS
from megatron_zpp.interchange.conversion import export_adapters, export_model
from megatron_zpp.interchange.open_model import load_model, open_model
from tests.megatron_zpp.interchange.adapters.trained_by_peft import of_peft
from tests.megatron_zpp.interchange.foreign_models import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt2,
    gpt_oss,
    granite_moe,
    llama,
    logits,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    saved,
)
from tests.megatron_zpp.train.finetuning import save_lora_checkpoint
from zeropp.errors import InputError

# Sums of fp32 products of order one, in another order in each of some dozens of operations.
LOGITS = dict(atol=1e-5, rtol=0)  # of mixtures
ALL = ("experts.gate", "experts.input", "experts.output")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
LAYER = "base_model.model.model.layers.0.mlp.experts."


def exported(base: Path, folder: Path, targets: tuple[str, ...]) -> tuple[torch.nn.Module, dict]:
    """Our model with adapters, and what --to-peft writes for it to `folder`."""
    ours = save_lora_checkpoint(base, folder.parent / "save", targets=targets)
    export_adapters(open_model(folder.parent / "save"), folder)
    return ours, json.loads((folder / CONFIG).read_text())


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (mixtral, ALL),
        (qwen2_moe, ("qkv", "gate", "input", "output")),  # of the shared expert too
        (qwen3_moe, ("experts.output", "blocks.1.mlp.experts.input")),
        (olmoe, ("blocks.0.mlp.experts.gate", "blocks.1.mlp.experts.input", *ALL[:1])),
        (granite_moe, ("qkv", *ALL)),
        (deepseek_v2, ("kv_up", "gate", "input", "output")),  # of a dense layer too
        (deepseek_v3, ALL),
        (gpt_oss, ("qkv", *ALL)),
        (minimax_m2, ("experts.gate",)),
        (glm4_moe, ("input",)),
    ],
)
def test_exports_are_the_same_model_in_peft_and_merged(make, targets, tmp_path):
    base, out = saved(make(), tmp_path / "base"), tmp_path / "adapters"
    ours, content = exported(base, out, targets)
    expected = logits(ours)
    assert (expected - logits(make())).abs().max() > 0.1
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits(theirs), expected, **LOGITS)
    torch.testing.assert_close(logits(load_model(out)[0]), expected, **LOGITS)
    export_model(open_model(tmp_path / "save"), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), expected, **LOGITS)
    assert content["lora_dropout"] == 0.0


def test_what_is_written_names_experts_as_parameters(tmp_path: Path) -> None:
    base = saved(qwen3_moe(), tmp_path / "base")
    _, content = exported(base, tmp_path / "adapters", ("attention.output", *ALL))
    assert content["target_modules"] == ["o_proj"]
    assert content["target_parameters"] == [DOWN, GATE_UP]
    (pattern,) = content["rank_pattern"].items()
    assert pattern == (r"mlp\.experts\.gate_up_proj", 8) and content["r"] == 4
    assert content["alpha_pattern"][pattern[0]] == 16 and content["lora_alpha"] == 8
    tensors = load_file(tmp_path / "adapters" / TENSORS)
    shapes = {name: list(tensors[LAYER + f"{name}.weight"].shape) for name in (
        "lora_A", "lora_B", "base_layer.lora_A", "base_layer.lora_B"
    )}  # fmt: skip
    assert shapes == {
        "lora_A": [16, 24], "lora_B": [36, 16],
        "base_layer.lora_A": [32, 36], "base_layer.lora_B": [48, 32],
    }  # fmt: skip


BOTH = dict(target_modules=["q_proj"], target_parameters=[GATE_UP, DOWN])
TRAINED = {
    "both parameters, and queries": (qwen2_moe, BOTH),
    "the outputs of all experts": (
        qwen2_moe, dict(target_modules=[], target_parameters=["down_proj"]),
    ),
    "gates and inputs of a layer": (qwen2_moe, dict(
        target_modules=[], target_parameters=["layers.1." + GATE_UP], use_rslora=True
    )),
    "names that mean shared experts": (qwen2_moe, dict(
        target_modules=["gate_proj", "up_proj", "down_proj", "v_proj"], lora_alpha=3
    )),
    "all that is linear, ranks by name": (qwen2_moe, dict(
        target_modules="all-linear", rank_pattern={"o_proj": 2, r"0\..*down_proj": 3},
        alpha_pattern={"k_proj": 5},
    )),
    "transposed experts": (
        gpt_oss, dict(target_modules=["o_proj"], target_parameters=[GATE_UP, DOWN]),
    ),
    "transposed gates and inputs": (
        gpt_oss, dict(target_modules=["o_proj"], target_parameters=[GATE_UP]),
    ),
    "an A for each of queries, keys and values": (llama, dict(target_modules="all-linear")),
    "queries and values": (llama, dict(target_modules=["q_proj", "v_proj"], lora_alpha=3)),
    "one layer, rsLoRA": (llama, dict(target_modules=["layers.1.mlp.up_proj"], use_rslora=True)),
    "transposed layers": (gpt2, dict(
        target_modules=["c_attn", "attn.c_proj", "c_fc"], fan_in_fan_out=True
    )),
}  # fmt: skip


@pytest.mark.parametrize(("make", "settings"), TRAINED.values(), ids=TRAINED)
def test_adapters_that_peft_trained(make: Callable, settings: dict, tmp_path: Path) -> None:
    base, out = saved(make(), tmp_path / "base"), tmp_path / "adapters"
    theirs = of_peft(AutoModelForCausalLM.from_pretrained(base), out, **settings)
    torch.testing.assert_close(logits(load_model(out)[0]), logits(theirs), rtol=0, atol=5e-5)


def test_names_of_modules_that_peft_turns_into_parameters(tmp_path: Path) -> None:
    base, out = saved(deepseek_v3(), tmp_path / "base"), tmp_path / "adapters"
    modules = ["gate_proj", "up_proj", "down_proj", "kv_b_proj"]
    theirs = of_peft(AutoModelForCausalLM.from_pretrained(base), out, target_modules=modules)
    content = json.loads((out / CONFIG).read_text())
    assert {*content["target_parameters"]} == {"gate_up_proj", "down_proj"}
    assert content["target_modules"] == ["kv_b_proj"]
    torch.testing.assert_close(logits(load_model(out)[0]), logits(theirs), **LOGITS)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """The folder of adapters of all experts, beside their base."""
    base = saved(mixtral(), tmp_path / "base")
    of_peft(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters", **BOTH)
    return tmp_path / "adapters"


def rewrite(folder: Path, change: Callable[[dict], object], **settings: object) -> None:
    """Change the tensors of a folder in place, and its settings."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)
    content = json.loads((folder / CONFIG).read_text()) | settings
    (folder / CONFIG).write_text(json.dumps(content))


def to_modules(tensors: dict[str, Tensor]) -> None:
    """Adapters of each expert, as PEFT saves them under transformers 4."""
    num, rank = 4, 4
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}."
        fused, single = f"{prefix}mlp.experts.", f"{prefix}block_sparse_moe.experts."
        for wrapper, names in (("base_layer.", ("w1", "w3")), ("", ("w2",))):
            a = tensors.pop(f"{fused}{wrapper}lora_A.weight").unflatten(0, (num, rank))
            b = tensors.pop(f"{fused}{wrapper}lora_B.weight").unflatten(1, (rank, num))
            for place, name in enumerate(names):
                for expert in range(num):
                    rows = b[..., expert].chunk(len(names))[place]
                    tensors[f"{single}{expert}.{name}.lora_A.weight"] = a[expert].clone()
                    tensors[f"{single}{expert}.{name}.lora_B.weight"] = rows


def to_columns(tensors: dict[str, Tensor]) -> None:
    """Adapters as PEFT before 0.19.1 trains them: of the transpose of each expert's matrix."""
    num, rank = 4, 4
    for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a = tensors[name].unflatten(0, (num, rank))
        b = tensors[other].unflatten(1, (rank, num))
        tensors[name] = b.permute(2, 1, 0).flatten(0, 1)
        tensors[other] = a.permute(2, 1, 0).flatten(1)


def test_older_layouts_are_the_same_model(both: Path) -> None:
    expected = logits(load_model(both)[0])
    rewrite(both, to_columns, peft_version="0.18.1")
    torch.testing.assert_close(logits(load_model(both)[0]), expected, **LOGITS)
    rewrite(both, to_columns)  # there and back
    targets = ["q_proj", "w1", "w2", "w3"]
    rewrite(both, to_modules, target_parameters=None, target_modules=targets)
    torch.testing.assert_close(logits(load_model(both)[0]), expected, **LOGITS)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.1"])
def test_square_experts_are_read_by_version(version: str, tmp_path: Path) -> None:
    base, out = saved(mixtral(intermediate_size=36), tmp_path / "base"), tmp_path / "adapters"
    settings = dict(target_modules=[], target_parameters=["down_proj"])
    theirs = of_peft(AutoModelForCausalLM.from_pretrained(base), out, **settings)
    rewrite(out, to_columns if version == "0.18.1" else len, peft_version=version)
    torch.testing.assert_close(logits(load_model(out)[0]), logits(theirs), **LOGITS)
    rewrite(out, len, peft_version=None)
    with pytest.raises(InputError, match=r"peft_version is None: before 0\.19\.1 PEFT took rows"):
        load_model(out)


A = LAYER + "lora_A.weight"
SINGLE = "base_model.model.model.layers.0.block_sparse_moe.experts.2.w2"


@pytest.mark.parametrize(
    ("change", "settings", "named"),
    [
        (lambda each: each.pop(A), {}, f"missing: {A}"),
        (lambda each: each.update({A: each[A][:12]}), {},
         f"{A} has shape [12, 40], expected [16, 40]"),
        (lambda each: each.update({f"{SINGLE}.lora_A.weight": torch.ones(4, 40),
                                   f"{SINGLE}.lora_B.weight": torch.ones(36, 4)}), {},
         "layers.0.mlp.experts.down_proj has adapters of all experts, and model.layers.0.block"),
        (len, {"target_parameters": [GATE_UP]}, f"extra: {LAYER}base_layer.lora_A.weight"),
        (len, {"target_parameters": None}, f"extra: {A}"),
        (len, {"target_parameters": "experts"}, "target_parameters is 'experts'; expected a list"),
        (len, {"rank_pattern": {"(": 4}}, "rank_pattern: '(' is no regular expression"),
        (len, {"rank_pattern": {DOWN: 0}}, "down_proj is 0; expected a whole number above 0"),
        (len, {"alpha_pattern": [2]}, "alpha_pattern is [2]; expected an object"),
        (len, {"target_modules": ["q_proj", "v_proj"]}, "self_attn.v_proj.lora_A.weight"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(change: Callable, settings: dict, named: str, both: Path) -> None:
    rewrite(both, change, **settings)
    with pytest.raises(InputError) as refused:
        load_model(both)
    assert named in str(refused.value)


def test_an_expert_without_its_adapter_is_named(both: Path) -> None:
    rewrite(both, to_modules, target_parameters=None, target_modules=["q_proj", "w1", "w2", "w3"])
    rewrite(both, lambda each: [each.pop(f"{SINGLE}.lora_{factor}.weight") for factor in "AB"])
    with pytest.raises(InputError, match=f"missing: {SINGLE}.lora_A.weight"):
        load_model(both)


def test_adapters_of_another_number_of_experts(both: Path, tmp_path: Path) -> None:
    other = saved(mixtral(num_local_experts=8), tmp_path / "other")
    with pytest.raises(InputError, match=r"has shape \[16, 40\], expected \[32, 40\]"):
        load_model(both, base=other)
