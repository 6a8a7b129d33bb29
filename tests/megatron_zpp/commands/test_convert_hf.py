"""Conversion from and to Hugging Face keeps logits, tensors and settings."""

import json
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.open_model import load_model, open_model
from megatron_zpp.settings.config import ModelConfig
from tests.launched import call
from tests.megatron_zpp.interchange.foreign_models import (
    ONE_FILE,
    add_tokenizer,
    gpt2,
    llama,
    logits,
    save_own,
    saved,
    tensors_in,
)

# Two fp32 forward passes differ by rounding: 2^-24 of the largest of the sums, a few hundred terms
# of size 1, in each of a dozen operations one after another.
LOGITS = dict(atol=5e-5, rtol=0)
MIB = 2**20


def to_checkpoint(source: Path, save: Path, *more: str) -> Path:
    assert main(["--from-hf", str(source), "--save", str(save), *more]) == 0
    return save


def to_folder(load: Path, output: Path, *more: str) -> Path:
    assert main(["--load", str(load), "--to-hf", str(output), *more]) == 0
    return output


def test_16_bits_stay_16_bits(tmp_path: Path) -> None:
    source = saved(llama().bfloat16(), tmp_path / "source")
    save = to_checkpoint(source, tmp_path / "save")
    facts = open_model(save).weights.facts()
    assert {fact.dtype for fact in facts.values()} == {torch.bfloat16}
    before, after = tensors_in(source), tensors_in(to_folder(save, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    wide = to_folder(save, tmp_path / "wide", "--dtype", "fp32")
    assert {tensor.dtype for tensor in tensors_in(wide).values()} == {torch.float32}
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("mask", [torch.float32, torch.bool, torch.uint8])
def test_files_of_the_bare_model_and_old_constants(mask: torch.dtype, tmp_path: Path) -> None:
    """The first GPT-2 has no prefix and its masks saved; other programs save a tied head."""
    theirs = gpt2()
    source = saved(theirs, tmp_path / "source")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors_in(source).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48).tril().to(mask)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, source / ONE_FILE)
    ours, _ = load_model(source)
    torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)


def test_rows_of_zeros_on_request(tmp_path: Path) -> None:
    theirs = llama()
    source = saved(theirs, tmp_path / "source")
    save = to_checkpoint(source, tmp_path / "save", "--make-vocab-size-divisible-by", "64")
    ours, tokenizer = load_model(save)
    assert (tokenizer.vocab_size, ours.padded_vocab_size) == (101, 128)
    padded = logits(ours)
    torch.testing.assert_close(padded[..., :101], logits(theirs), **LOGITS)
    assert not padded[..., 101:].any()
    before, after = tensors_in(source), tensors_in(to_folder(save, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_tokenizer_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The tokenizer has 12 words and the model 101 rows: all rows are converted."""
    source = saved(llama(), tmp_path / "source")
    add_tokenizer(source)
    save = to_checkpoint(source, tmp_path / "save")
    printed = capsys.readouterr().out
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {save}/hugging_face" in printed
    assert f"--load {save} --finetune --use-checkpoint-args" in printed
    shutil.rmtree(source)
    moved = save.rename(tmp_path / "moved")
    opened = open_model(moved)
    assert (opened.tokenizer.vocab_size, opened.tokenizer.eod) == (12, 0)
    assert opened.config.padded_vocab_size(12) == 101
    assert opened.tokenizer.encode("the cat sat") == [1, 2, 3]
    back = to_folder(moved, tmp_path / "back")
    assert AutoTokenizer.from_pretrained(back).encode("the cat sat") == [1, 2, 3]
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"
    assert tensors_in(back)["lm_head.weight"].shape == (101, 36)


def test_a_model_of_our_own(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A GPT-2, whose vocabulary is padded here; other families in families/test_table.py."""
    model = ModelConfig(num_layers=2, hidden_size=32, seq_length=48, layernorm_epsilon=1e-3)
    save, tokenizer = save_own(model, tmp_path / "save")
    back = to_folder(save, tmp_path / "back")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("without a tokenizer: Hugging Face's libraries cannot make the ids "
                               "of NullTokenizer")  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(back).eval()
    assert theirs.config.vocab_size == tokenizer.vocab_size == 97
    ours, _ = load_model(save)
    torch.testing.assert_close(logits(ours)[..., :97], logits(theirs), **LOGITS)
    again = open_model(back)
    assert again.config.padded_vocab_size(97) == 97
    for name, tensor in again.tensors():
        assert torch.equal(tensor, open_model(save).weights.read(name)[: len(tensor)]), name


def test_a_model_trained_further_and_saved_elsewhere(tmp_path: Path) -> None:
    """Settings and rows beyond the tokenizer's follow from the folder that the tokenizer is in."""
    source = saved(llama(), tmp_path / "source")
    add_tokenizer(source)
    opened = open_model(to_checkpoint(source, tmp_path / "save"))
    tuned, _ = save_own(opened.config, tmp_path / "tuned", opened.tokenizer_config)
    back = to_folder(tuned, tmp_path / "back")
    config = json.loads((source / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == config
    assert tensors_in(back)["lm_head.weight"].shape == (101, 36)
    assert (back / "generation_config.json").exists()
    other = replace(opened.config, layernorm_epsilon=1e-3)
    tuned, _ = save_own(other, tmp_path / "other", opened.tokenizer_config)
    written = json.loads((to_folder(tuned, tmp_path / "new") / "config.json").read_text())
    assert written["rms_norm_eps"] == 1e-3 and written["vocab_size"] == 12


# Memory: tensors of 4 MiB, 40 of them.


def run_and_measure(steps: list[list[str]], result: Path) -> None:
    used = []
    for arguments in steps:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        status = main(arguments)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used.append((status, (after - before) * 1024))
    result.write_text(json.dumps(used))


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A tensor is held as read, joined and written; files of 40 MiB are never held whole."""
    sizes = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=10, vocab_size=1024)
    heads = dict(num_attention_heads=16, num_key_value_heads=16)
    source = saved(llama(**sizes, **heads), tmp_path / "source", shards="60MB")
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert total > 70 * 4 * MIB
    save, back = str(tmp_path / "save"), str(tmp_path / "back")
    steps = [["--from-hf", str(source), "--save", save], ["--load", save, "--to-hf", back]]
    assert call(run_and_measure, steps, tmp_path / "used").wait(120) == 0
    used = json.loads((tmp_path / "used").read_text())
    assert [status for status, _ in used] == [0, 0]
    assert (tmp_path / "back" / ONE_FILE).stat().st_size == pytest.approx(total, rel=0.01)
    # A joined matrix is 12 MiB, with its parts and what is written 36; torch's code some 30 more.
    assert max(num_bytes for _, num_bytes in used) < total / 2
