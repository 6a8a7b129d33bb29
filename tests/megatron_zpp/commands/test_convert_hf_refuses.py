"""Errors of the conversion: each names the file and the problem, and nothing is written."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange import gguf
from megatron_zpp.settings.config import ModelConfig
from tests.megatron_zpp.interchange.foreign_models import (
    ONE_FILE,
    add_tokenizer,
    change,
    gemma2,
    gemma3,
    gpt2,
    llama,
    mistral,
    neox,
    olmo3,
    phi3,
    qwen2,
    save_own,
    saved,
    set_config,
    smollm3,
)
from tests.megatron_zpp.interchange.foreign_tables import LLAMA3


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


def test_a_head_that_is_not_the_tied_embedding(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    change(tiny, lm_head__weight=torch.zeros(97, 32))
    assert "lm_head.weight differs from transformer.wte.weight" in import_error(tiny, capsys)


SETTINGS = {
    "model type": (
        {"model_type": "mamba2", "architectures": None},
        "type 'mamba2' is not supported",
    ),
    "known ones": ({"model_type": "mamba2"}, "gpt2 (GPT2LMHeadModel), llama (LlamaForCausalLM)"),
    "experts": (
        {"model_type": "dbrx", "architectures": ["DbrxForCausalLM"]},
        "'dbrx' (DbrxForCausalLM) is not supported: it has a mixture of experts of another",
    ),
    "class": ({"architectures": ["GPT2ForTokenClassification"]}, "(GPT2ForTokenClassification)"),
    "no type": ({"model_type": None}, "type None"),
    "activation": ({"activation_function": "mish"}, "activation_function is 'mish'; expected"),
    "switch": (
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is True; expected false",
    ),
    "word": ({"n_layer": "two"}, "n_layer is 'two'; expected a whole number"),
    "zero": ({"n_head": 0}, "n_head is 0"),
    "sizes": ({"n_head": 5}, "--hidden-size 32 is not divisible"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "no list": ({"architectures": "GPT2LMHeadModel"}, "expected a list of names"),
    "no names": ({"architectures": [["GPT2LMHeadModel"]]}, "is not supported"),
    "tied": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
    "width": ({"n_embd": 10**30}, "expected a whole number above 0"),
    "depth": ({"n_layer": 10**3}, "28 tensors cannot be the 1,000 layers"),
    "most layers": ({"n_layer": 2 * 10**9}, "--num-layers 2000000000: expected at most 10000"),
}


@pytest.mark.parametrize(("entries", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_we_do_not_have(
    entries: dict, message: str, tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    set_config(tiny, **entries)
    assert message in import_error(tiny, capsys)


LLAMAS = {
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "original_max_position_embeddings is None; expected a whole number",
    ),
    "mscale": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "7",
                          "original_max_position_embeddings": 40}},
        "mscale of the yarn scaling is '7'",
    ),
    "old key": (
        {"rope_scaling": {"type": "axial", "factor": 2.0}},
        "'axial' are not supported; supported are default, dynamic, linear, llama3, yarn",
    ),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "scaling is 0.5; expected"),
    "llama3": (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "--rope-scaling-low-freq-factor 4 is not below --rope-scaling-high-freq-factor 4",
    ),
    "base": ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5"),
    "base of NaN": ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta is nan"),
    "base of infinity": ({"rope_theta": math.inf, "rope_parameters": None}, "rope_theta is inf"),
    "base of truth": ({"rope_parameters": {"rope_theta": True}}, "rope_theta is True"),
    "no object": ({"rope_parameters": [1]}, "rope_parameters is [1]; expected an object"),
    "a name": ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; expected an object"),
    "no factor": ({"rope_scaling": {**LLAMA3, "factor": None}}, "llama3 scaling is None; expected"),
    "odd factor": ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "llama3 scaling is '8'; expected"),
    "part": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "biases": ({"mlp_bias": "some"}, "mlp_bias is 'some'; expected true or false"),
    "activation": ({"hidden_act": "mish"}, "hidden_act is 'mish'; expected"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "message"), LLAMAS.values(), ids=LLAMAS)
def test_settings_of_a_llama_we_do_not_have(
    entries: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = saved(llama(), tmp_path / "source")
    set_config(source, **entries)
    assert message in import_error(source, capsys)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n_layer": 1%s}' % ("0" * 5000)])
def test_a_config_that_is_not_json(text: str, tiny: Path, capsys: pytest.CaptureFixture) -> None:
    (tiny / "config.json").write_text(text)
    assert "config.json: not JSON that can be read" in import_error(tiny, capsys)


def test_settings_of_a_gpt_neox_we_do_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = saved(neox(), tmp_path / "source")
    set_config(source, use_parallel_residual="yes")
    message = "use_parallel_residual is 'yes'; expected true or false"
    assert message in import_error(source, capsys)
    set_config(source, use_parallel_residual=False, rope_parameters=None, rotary_pct=2)
    message = "rotary_pct is 2; only a share above 0 and up to 1 is supported"
    assert message in import_error(source, capsys)


LAYERS = {
    "types": (olmo3, {"layer_types": ["chunked_attention"] * 4}, "only lists of sliding_attention"),
    "number of types": (olmo3, {"layer_types": ["full_attention", "sliding_attention"]},
                        "has 2 numbers, but there are 4 layers"),
    "window": (mistral, {"sliding_window": "wide"}, "sliding_window is 'wide'; expected a whole"),
    "first layers": (qwen2, {"use_sliding_window": True, "sliding_window": 4, "layer_types": None,
                             "max_window_layers": "all"}, "max_window_layers is 'all'"),
    "local scaling": (gemma3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
                      "of type 'linear' in layers with a window are not supported"),
    "no rope": (smollm3, {"no_rope_layers": "some"}, "no_rope_layers is 'some'; expected a list"),
    "factors": (phi3, {"rope_scaling": {"type": "longrope", "short_factor": 3}},
                "short_factor is 3; expected numbers"),
    "number of factors": (
        phi3, {"rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]},
               "original_max_position_embeddings": 16}, "has 1 numbers: expected 3 of each"),
    "both directions": (gemma2, {"use_bidirectional_attention": True}, "is True; expected false"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "entries", "message"), LAYERS.values(), ids=LAYERS)
def test_settings_of_layers_we_do_not_have(
    make: callable, entries: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = saved(make(), tmp_path / "source")
    set_config(source, **entries)
    assert message in import_error(source, capsys)


def test_a_file_that_is_cut_off(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    content = (tiny / ONE_FILE).read_bytes()
    for length in (0, 5, 200, len(content) - 1):
        (tiny / ONE_FILE).write_bytes(content[:length])
        assert "not a whole safetensors file" in import_error(tiny, capsys)


def test_a_damaged_header(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    content = bytearray((tiny / ONE_FILE).read_bytes())
    content[8:20] = b"\xff" * 12
    (tiny / ONE_FILE).write_bytes(content)
    assert "not a whole safetensors file" in import_error(tiny, capsys)


def test_quantized_weights_are_refused(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    change(tiny, transformer__wpe__weight=torch.zeros(48, 32, dtype=torch.int8))
    text = import_error(tiny, capsys)
    assert "transformer.wpe.weight (I8)" in text and "dequantize" in text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(
    number: float, tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    bias = torch.zeros(32)
    bias[3] = number
    change(tiny, transformer__ln_f__bias=bias)
    message = f"{tiny / ONE_FILE}: transformer.ln_f.bias holds NaN or infinity"
    assert message in import_error(tiny, capsys)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(llama(), tmp_path / "sharded", shards="20KB")


def test_an_index_that_names_absent_files(sharded: Path, capsys: pytest.CaptureFixture) -> None:
    gone = sorted(sharded.glob("model-*"))[1]
    gone.unlink()
    text = import_error(sharded, capsys)
    assert f"names files that are not there: {gone.name}" in text


def test_a_truncated_shard(sharded: Path, capsys: pytest.CaptureFixture) -> None:
    shard = sorted(sharded.glob("model-*"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    text = import_error(sharded, capsys)
    assert shard.name in text and "not a whole safetensors file" in text


@pytest.mark.parametrize(
    ("change_map", "message"),
    [
        (lambda m: m.pop("model.norm.weight"), "model.norm.weight: not where the index says"),
        (lambda m: m.update(odd=m["lm_head.weight"]), "odd: not where the index says"),
        (lambda m: m.update(odd="../x"), "'../x' is not the name of a file beside it"),
        (lambda m: m.clear(), "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(
    change_map: callable, message: str, sharded: Path, capsys: pytest.CaptureFixture
) -> None:
    path = sharded / f"{ONE_FILE}.index.json"
    index = json.loads(path.read_text())
    change_map(index["weight_map"])
    path.write_text(json.dumps(index))
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


def test_a_tokenizer_with_too_many_entries(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    add_tokenizer(tiny, ["<|endoftext|>", *(f"word{number}" for number in range(97))])
    text = import_error(tiny, capsys)
    assert "the tokenizer has 98 entries, but the model only 97 rows" in text


def test_a_multiple_that_leaves_rows_out(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    add_tokenizer(tiny)
    text = import_error(tiny, capsys, "--make-vocab-size-divisible-by", "8")
    assert "12 entries in a multiple of 8 are 16 rows, but the model has 97" in text


def test_another_tokenizer_than_the_checkpoints(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
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


def test_a_model_of_no_hugging_face_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = ModelConfig(num_layers=1, hidden_size=32, position_embedding_type="rope", swiglu=True)
    save, _ = save_own(model, tmp_path / "save")
    text = error_of(["--load", str(save), "--to-hf", str(tmp_path / "back")], capsys)
    assert "gpt2: position_embedding_type is rope, not learned_absolute" in text
    assert "llama: normalization is LayerNorm, not RMSNorm" in text
    assert "gpt_neox: swiglu is True, not False" in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["--from-hf", "a"], ["--load", "a", "--save", "b"],
     ["--from-hf", "a", "--save", "b", "--to-hf", "c"]],
)  # fmt: skip
def test_missing_flags(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert "give --from-hf and --save, or --load and --to-hf" in error_of(arguments, capsys)


def test_flags_of_the_other_direction(capsys: pytest.CaptureFixture) -> None:
    arguments = ["--load", "a", "--to-hf", "b", "--make-vocab-size-divisible-by", "8"]
    assert "is for --from-hf" in error_of(arguments, capsys)


def test_a_number_too_large_for_fp16(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    theirs: PreTrainedModel = gpt2()
    with torch.no_grad():
        theirs.transformer.wpe.weight[3, 4] = 70000
    save = to_checkpoint(saved(theirs, tmp_path / "source"), tmp_path / "save")
    arguments = ["--load", str(save), "--to-hf", str(tmp_path / "back"), "--dtype", "fp16"]
    assert "transformer.wpe.weight holds 70000, more than fp16 can" in error_of(arguments, capsys)
    assert not (tmp_path / "back" / "config.json").exists()
    assert load_file(tmp_path / "source" / ONE_FILE)


def test_a_gguf_without_the_packages(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "PACKAGES", ("no_such_package",))
    text = import_error(tmp_path / "a.gguf", capsys)
    assert "reading a.gguf needs the package no_such_package: pip install" in text


def test_a_gguf_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for package in gguf.PACKAGES:
        pytest.importorskip(package)
    assert "a.gguf: no such file" in import_error(tmp_path / "a.gguf", capsys)
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    assert "a.gguf: transformers cannot read it" in import_error(tmp_path / "a.gguf", capsys)
