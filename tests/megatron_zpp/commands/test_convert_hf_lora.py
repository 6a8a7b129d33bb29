"""Conversion of LoRA adapters to and from PEFT, merged models, and bad input."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_zpp.capabilities.lora.merged_weights import MergedWeights
from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.adapters.peft_config import CONFIG, TENSORS, shortest_suffixes
from megatron_zpp.interchange.open_model import load_model, open_model
from tests.megatron_zpp.interchange.adapters.trained_by_peft import of_peft
from tests.megatron_zpp.interchange.foreign_models import (
    bloom,
    deepseek_v3,
    gemma3,
    gpt2,
    llama,
    logits,
    neox,
    phi3,
    qwen3,
    save_own,
    saved,
    tiny,
)
from tests.megatron_zpp.train.finetuning import save_lora_checkpoint

# Two fp32 forward passes differ by rounding: 2^-24 of the largest of the sums, a few hundred terms
# of size 1, in each of a dozen operations one after another.
LOGITS = dict(atol=5e-5, rtol=0)
MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama, as many keys as queries": lambda: llama(num_key_value_heads=6, attention_bias=True,
                                                    mlp_bias=True),
    "gpt_neox": neox,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "bloom": bloom,
    "deepseek_v3": deepseek_v3,
    "nanochat": partial(tiny, "nanochat"),
}  # fmt: skip


def run(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def error(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "is_whole"),
    [*((make, True) for make in MODELS.values()), (gpt2, False), (llama, False)],
)
def test_adapters_give_the_same_logits_in_peft(make: callable, is_whole: bool, tmp_path: Path):
    base, save, out = saved(make(), tmp_path / "base"), tmp_path / "save", tmp_path / "adapters"
    ours = save_lora_checkpoint(base, save, is_whole=is_whole)
    expected = logits(ours)
    run("--load", save, "--to-peft", out)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out).eval()  # knows its base
    assert theirs.peft_config["default"].base_model_name_or_path == str(base)
    torch.testing.assert_close(logits(theirs), expected, **LOGITS)
    assert (expected - logits(make())).abs().max() > 0.1
    config = theirs.peft_config["default"]
    has_experts = make is deepseek_v3  # whose MLPs are parameters, for which PEFT has no dropout
    assert (config.r, config.lora_alpha) == (4, 8)
    assert config.lora_dropout == (0.0 if has_experts else 0.1)
    assert config.fan_in_fan_out == (make is gpt2)
    merged, _ = load_model(save)
    torch.testing.assert_close(logits(merged), expected, **LOGITS)
    run("--load", save, "--to-hf", tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(again), expected, **LOGITS)
    back, _ = load_model(out)
    torch.testing.assert_close(logits(back), expected, **LOGITS)
    for name, tensor in open_model(out).tensors():
        torch.testing.assert_close(tensor, open_model(save).weights.read(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("qkv",), ["k_proj", "q_proj", "v_proj"]),
        (("blocks.1.attention.output", "mlp.gate"), ["1.self_attn.o_proj", "gate_proj"]),
    ],
)
def test_only_some_layers(layers: tuple[str, ...], expected: list[str], tmp_path: Path) -> None:
    base, save, out = saved(llama(), tmp_path / "base"), tmp_path / "save", tmp_path / "adapters"
    ours = save_lora_checkpoint(base, save, targets=layers)
    run("--load", save, "--to-peft", out, "--dtype", "bf16", "--base-name", "someone/llama")
    content = json.loads((out / CONFIG).read_text())
    assert content["target_modules"] == expected
    assert content["base_model_name_or_path"] == "someone/llama"
    assert {tensor.dtype for tensor in load_file(out / TENSORS).values()} == {torch.bfloat16}
    theirs = peft.PeftModel.from_pretrained(llama(), out).eval()
    # bf16 keeps 8 bits of each adapter: 2^-9 of changes that move logits by some units.
    torch.testing.assert_close(logits(theirs), logits(ours), atol=0.05, rtol=0)


def test_target_module_names_are_as_short_as_possible() -> None:
    modules = [f"h.{block}.{name}" for block in (1, 11) for name in ("attn.c_proj", "mlp.c_proj")]
    assert shortest_suffixes(modules, modules) == ["c_proj"]
    assert shortest_suffixes(modules[1::2], modules) == ["mlp.c_proj"]
    assert shortest_suffixes(modules[:1], modules) == ["1.attn.c_proj"]


def test_adapters_of_fused_layers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """PEFT has one adapter for queries, keys and values, as we have, and one for gate and input."""
    theirs = of_peft(phi3(), tmp_path / "adapters", target_modules="all-linear")
    base = saved(phi3(), tmp_path / "base")
    ours, _ = load_model(tmp_path / "adapters", base=base)
    torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)

    save, out = tmp_path / "save", tmp_path / "out"
    trained = save_lora_checkpoint(base, save, targets=("attention.qkv", "mlp.output"))
    run("--load", save, "--to-peft", out)
    again = peft.PeftModel.from_pretrained(phi3(), out).eval()
    torch.testing.assert_close(logits(again), logits(trained), **LOGITS)

    save_lora_checkpoint(base, tmp_path / "gates", targets=("mlp.gate",))
    text = error(capsys, "--load", tmp_path / "gates", "--to-peft", tmp_path / "refused")
    assert "blocks.0.mlp.gate is a part of Hugging Face's layer model.layers.0.mlp.gate_up" in text
    assert "merge the adapters into the model, --to-hf" in text
    assert not (tmp_path / "refused").exists()


def test_16_bit_bases_lose_nothing_unless_asked(tmp_path: Path) -> None:
    base, save = saved(llama().bfloat16(), tmp_path / "base"), tmp_path / "save"
    ours = save_lora_checkpoint(base, save, is_whole=False)
    opened = open_model(save)
    assert {fact.dtype for fact in opened.weights.facts().values()} == {torch.float32}
    assert isinstance(opened.weights, MergedWeights) and opened.base == base
    torch.testing.assert_close(logits(load_model(save)[0]), logits(ours), **LOGITS)
    run("--load", save, "--to-hf", tmp_path / "narrow", "--dtype", "bf16")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert narrow.dtype == torch.bfloat16


# Bad input.


def test_a_base_that_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base, save, out = saved(llama(), tmp_path / "base"), tmp_path / "save", tmp_path / "adapters"
    expected = logits(save_lora_checkpoint(base, save, is_whole=False))
    moved = base.rename(tmp_path / "moved")
    message = error(capsys, "--load", save, "--to-peft", out)
    assert (
        f"adapters of the model {base}, which cannot be opened" in message and "--base" in message
    )
    run("--load", save, "--to-peft", out, "--base", moved)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(logits(theirs), expected, **LOGITS)
    assert "holds adapters already" in error(
        capsys, "--load", save, "--to-peft", out, "--base", moved
    )
    message = error(capsys, "--load", save, "--to-peft", tmp_path / "no", "--base", save)
    assert "cannot be its own base" in message
    run("--load", out, "--to-hf", tmp_path / "whole", "--base", moved)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(logits(whole), expected, **LOGITS)
    moved.rename(tmp_path / "gone")
    message = error(capsys, "--load", out, "--to-hf", tmp_path / "merged")
    assert f"its base model '{moved}' is not a folder here" in message and "--base" in message
    message = error(capsys, "--load", out, "--to-hf", tmp_path / "merged", "--base", moved)
    assert f"--base {moved}: there is no model" in message
    assert not (tmp_path / "merged").exists() and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(intermediate_size=48), "ffn_hidden_size is 48, expected 40"),
        (dict(num_hidden_layers=3), "num_layers is 3, expected 2"),
        (dict(num_attention_heads=3, num_key_value_heads=1, head_dim=12),
         "num_attention_heads is 3, expected 6"),
        (dict(tie_word_embeddings=True), "untie_embeddings_and_output_weights is False"),
    ],
)  # fmt: skip
def test_a_base_of_another_shape(change, named, tmp_path, capsys):
    base, save = saved(llama(), tmp_path / "base"), tmp_path / "save"
    save_lora_checkpoint(base, save)  # all weights: --base is not needed, and may be given
    other = saved(llama(**change), tmp_path / "other")
    message = error(capsys, "--load", save, "--to-hf", tmp_path / "out", "--base", other)
    assert f"{other} is not the model that the adapters in {save}" in message and named in message
    out = tmp_path / "adapters"
    run("--load", save, "--to-peft", out)
    if "intermediate_size" in change:
        message = error(capsys, "--load", out, "--to-hf", tmp_path / "out", "--base", other)
        assert "not adapters of the model's layers" in message
        assert "mlp.gate_proj.lora_B.weight has shape [40, 4], expected [48, 4]" in message


def test_checkpoints_without_adapters(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = saved(llama(), tmp_path / "base")
    own, _ = save_own(open_model(base).config, tmp_path / "own")
    message = error(capsys, "--load", own, "--to-peft", tmp_path / "out")
    assert "has no adapters of its own: expected a checkpoint of a run with --lora-rank" in message
    assert "leave --base out" in error(
        capsys, "--load", own, "--to-hf", tmp_path / "out", "--base", base
    )
    assert "leave --base out" in error(
        capsys, "--load", base, "--to-hf", tmp_path / "out", "--base", base
    )
    assert not (tmp_path / "out").exists()


def damaged(folder: Path) -> None:
    content = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(content[: len(content) // 2])


def without_b(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"]
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.ones(4, 36)
    save_file(tensors, folder / TENSORS)


def setting(**entries: object) -> callable:
    def change(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text()) | entries
        (folder / CONFIG).write_text(json.dumps(content))

    return change


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEFT's for a base beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    save_lora_checkpoint(saved(llama(), folder / "base"), folder / "save")
    run("--load", folder / "save", "--to-peft", folder / "adapters")
    return folder / "adapters"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (damaged, ["not a whole safetensors file"]),
        (without_b, ["missing: base_model.model.model.layers.0.mlp.up_proj.lora_B.weight",
                     "extra: base_model.model.lm_head.lora_A.weight"]),
        (setting(r=8), ["has shape [4, 36], expected [8, 36]"]),
        (setting(r=0), ["r is 0; expected a whole number above 0"]),
        (setting(r=4.5), ["r is 4.5; expected a whole number above 0"]),
        (setting(r=10**400), ["expected a whole number above 0"]),
        (setting(lora_alpha=math.nan), ["lora_alpha is nan; expected a number above 0"]),
        (setting(lora_alpha=math.inf), ["lora_alpha is inf; expected a number above 0"]),
        (setting(base_model_name_or_path=["x"]), ["_path is ['x']; expected a name"]),
        (setting(use_dora=True), ["only plain LoRA is supported: use_dora is True"]),
        (setting(peft_type="IA3"), ["peft_type is 'IA3', not 'LORA'"]),
        (setting(base_model_name_or_path=None), ["its base model None is not a folder here"]),
        (lambda folder: (folder / CONFIG).write_text("[]"), ["expected an object in braces"]),
        (lambda folder: (folder / TENSORS).unlink(), [f"neither {TENSORS} nor"]),
    ],
)  # fmt: skip
def test_damaged_folders_of_adapters(spoil, named, adapters, tmp_path, capsys):
    out = shutil.copytree(adapters, tmp_path / "adapters")
    spoil(out)
    message = error(capsys, "--load", out, "--to-hf", tmp_path / "merged")
    assert all(name in message for name in named), message
    assert not (tmp_path / "merged").exists()


def test_circular_bases(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        content = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / other)}
        (tmp_path / name / CONFIG).write_text(json.dumps(content))
    message = error(capsys, "--load", tmp_path / "a", "--to-hf", tmp_path / "merged")
    assert "leads back to it" in message
