"""Errors of the conversion: each names the file and the problem, and nothing is written."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange import gguf
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.interchange import foreign_models
from tests.megatron_zpp.interchange.foreign_models import (
    ONE_FILE,
    add_tokenizer,
    change,
    gpt2,
    llama,
    save_own,
    saved,
    set_config,
)
from tests.megatron_zpp.settings.tables import rows


def to_checkpoint(source: Path, save: Path) -> Path:
    assert main(["--from-hf", str(source), "--save", str(save)]) == 0
    return save


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return saved(gpt2(), tmp_path / "tiny")


def error_of(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    assert main(arguments) == 1
    text = capsys.readouterr().err
    assert "error: " in text and "Traceback" not in text
    return text[text.index("error: ") :]


def import_error(source: Path, capsys: pytest.CaptureFixture, *more: str) -> str:
    save = source.parent / "refused"
    text = error_of(["--from-hf", str(source), "--save", str(save), *more], capsys)
    assert not list(save.glob("*iter_*"))
    return text


def test_every_wrong_tensor_is_named(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    change(
        tiny,
        drop=("transformer.h.0.ln_1.bias", "transformer.wpe.weight"),
        transformer__h__1__attn__c_attn__weight=torch.zeros(96, 32),
        transformer__h__2__ln_1__weight=torch.zeros(32),
    )
    text = import_error(tiny, capsys)
    assert "missing: transformer.h.0.ln_1.bias" in text
    assert "missing: transformer.wpe.weight" in text
    assert "extra: transformer.h.2.ln_1.weight" in text
    assert "transformer.h.1.attn.c_attn.weight has shape [96, 32], expected [32, 96]" in text
    assert len(text.strip().splitlines()) == 5


model_of = functools.cache(foreign_models.tiny)


@pytest.mark.parametrize("row", rows("refused_models.tsv"), ids=lambda row: row["words"])
def test_settings_we_do_not_have(row, tmp_path, capsys):
    source = saved(model_of(row["model"]), tmp_path / "source")
    set_config(source, **json.loads(row["entries"]))
    assert row["words"] in import_error(source, capsys)


def cut_off(length: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = max(folder.glob("*.safetensors"))  # the last shard
        path.write_bytes(path.read_bytes()[:length])

    return spoil


def damage_header(folder: Path) -> None:
    content = bytearray((folder / ONE_FILE).read_bytes())
    content[8:20] = b"\xff" * 12
    (folder / ONE_FILE).write_bytes(content)


def with_bias(number: float) -> Callable[[Path], None]:
    bias = torch.zeros(32)
    bias[3] = number
    return lambda folder: change(folder, transformer__ln_f__bias=bias)


def with_index(change_map: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / f"{ONE_FILE}.index.json"
        index = json.loads(path.read_text())
        change_map(index["weight_map"])
        path.write_text(json.dumps(index))

    return spoil


def with_config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text)


INT8 = torch.zeros(48, 32, dtype=torch.int8)
WHOLE = [
    (lambda folder: change(folder, lm_head__weight=torch.zeros(97, 32)),
     "lm_head.weight differs from transformer.wte.weight"),
    *((cut_off(length), "not a whole safetensors file") for length in (0, 5, 200, -1)),
    (damage_header, "not a whole safetensors file"),
    (lambda folder: change(folder, transformer__wpe__weight=INT8),
     "transformer.wpe.weight (I8); dequantize"),
    *((with_bias(number), "transformer.ln_f.bias holds NaN or infinity")
      for number in (math.nan, math.inf, -math.inf)),
    *((with_config(text), "config.json: not JSON that can be read")
      for text in ("[" * 100_000, '{"n_layer": 1%s}' % ("0" * 5000))),
    (lambda folder: add_tokenizer(folder, ["<|endoftext|>", *map(str, range(97))]),
     "the tokenizer has 98 entries, but the model only 97 rows"),
]  # fmt: skip
SHARDED = [
    (lambda folder: sorted(folder.glob("model-*"))[1].unlink(),
     "names files that are not there: model-00002-of-"),
    (cut_off(-4), "not a whole safetensors file"),
    (with_index(lambda m: m.pop("model.norm.weight")), "norm.weight: not where the index says"),
    (with_index(lambda m: m.update(odd=m["lm_head.weight"])), "odd: not where the index says"),
    (with_index(lambda m: m.update(odd="../x")), "'../x' is not the name of a file beside it"),
    (with_index(lambda m: m.clear()), "has no weight_map"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), WHOLE)
def test_a_damaged_file_is_named(spoil, message, tiny, capsys):
    spoil(tiny)
    text = import_error(tiny, capsys)
    assert all(words in text for words in message.split("; ")) and str(tiny) in text


@pytest.mark.parametrize(("spoil", "message"), SHARDED)
def test_damaged_shards_are_named(spoil, message, tmp_path, capsys):
    sharded = saved(llama(), tmp_path / "sharded", shards="20KB")
    spoil(sharded)
    assert message in import_error(sharded, capsys)


def test_folders_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "expected a folder of checkpoints (iter_0000100 in it), a Hugging" in import_error(
        folder, capsys
    )
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin: save it as safetensors first" in import_error(folder, capsys)
    (folder / "pytorch_model.bin").unlink()
    saved(gpt2(), folder)
    (folder / "config.json").write_text("{")
    assert "not JSON (line 1, column 2" in import_error(folder, capsys)
    (folder / "config.json").write_text("[1]")
    assert "expected an object in braces" in import_error(folder, capsys)


def test_a_multiple_that_leaves_rows_out(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    add_tokenizer(tiny)
    text = import_error(tiny, capsys, "--make-vocab-size-divisible-by", "8")
    assert "12 entries in a multiple of 8 are 16 rows, but the model has 97" in text


def test_another_tokenizer_than_the_checkpoints(tiny, tmp_path, capsys):
    save = to_checkpoint(tiny, tmp_path / "save")
    arguments = ["--load", str(save), "--to-hf", str(tmp_path / "back")]
    text = error_of([*arguments, "--tokenizer-type", "ByteLevelTokenizer"], capsys)
    assert "was trained with another tokenizer" in text


def test_nothing_is_written_over(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save = to_checkpoint(tiny, tmp_path / "save")
    text = error_of(["--from-hf", str(tiny), "--save", str(save)], capsys)
    assert "holds checkpoints already" in text
    text = error_of(["--load", str(save), "--to-hf", str(tiny)], capsys)
    assert "holds a model already" in text
    text = error_of(["--load", str(save), "--to-hf", str(save)], capsys)
    assert "holds checkpoints: name another folder" in text
    assert not (save / "config.json").exists()
    text = error_of(["--from-hf", str(tiny), "--save", str(tiny)], capsys)
    assert "holds a Hugging Face model: name another folder" in text
    text = error_of(["--from-hf", str(save), "--save", str(tmp_path / "other")], capsys)
    assert "is a checkpoint of this program already" in text


def test_a_model_of_no_hugging_face_architecture(tmp_path, capsys):
    model = ModelConfig(num_layers=1, hidden_size=32, position_embedding_type="rope", swiglu=True)
    save, _ = save_own(model, tmp_path / "save")
    text = error_of(["--load", str(save), "--to-hf", str(tmp_path / "back")], capsys)
    assert "gpt2: position_embedding_type is rope, not learned_absolute" in text
    assert "llama: normalization is LayerNorm, not RMSNorm" in text
    assert "gpt_neox: swiglu is True, not False" in text


def test_a_number_too_large_for_fp16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    theirs: PreTrainedModel = gpt2()
    with torch.no_grad():
        theirs.transformer.wpe.weight[3, 4] = 70000
    save = to_checkpoint(saved(theirs, tmp_path / "source"), tmp_path / "save")
    arguments = ["--load", str(save), "--to-hf", str(tmp_path / "back"), "--dtype", "fp16"]
    assert "transformer.wpe.weight holds 70000, more than fp16 can" in error_of(arguments, capsys)
    assert not (tmp_path / "back" / "config.json").exists()
    assert load_file(tmp_path / "source" / ONE_FILE)


def test_a_gguf_without_the_packages(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gguf, "PACKAGES", ("no_such_package",))
    text = import_error(tmp_path / "a.gguf", capsys)
    assert "reading a.gguf needs the package no_such_package: pip install" in text


def test_a_gguf_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for package in gguf.PACKAGES:
        pytest.importorskip(package)
    assert "a.gguf: no such file" in import_error(tmp_path / "a.gguf", capsys)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "a.gguf: transformers cannot read it" in import_error(tmp_path / "a.gguf", capsys)
