"""Models in and out: logits, tensors and settings the same, and bad input named."""

import json
import multiprocessing
import resource
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_zpp import checkpoint
from megatron_zpp.config import Config, ModelConfig, TokenizerConfig
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.open_model import load_model, open_model
from megatron_zpp.resume import architecture, settings
from megatron_zpp.tokenizer import build_tokenizer
from tests.megatron_zpp.foreign_models import (
    MODELS,
    ONE_FILE,
    add_tokenizer,
    change,
    gpt2,
    llama,
    saved,
    set_config,
    tensors_in,
)
from tests.ranks import PRELOADED
from tools.convert_hf import main

# Two fp32 forward passes differ by rounding: 2^-24 of the largest of the sums, a few hundred terms
# of size 1, in each of a dozen operations one after another.
LOGITS = dict(atol=5e-5, rtol=0)
MIB = 2**20


def tokens() -> Tensor:
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(3))


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(tokens())
    return found if isinstance(found, Tensor) else found.logits


def to_checkpoint(source: Path, save: Path, *more: str) -> Path:
    assert main(["--from-hf", str(source), "--save", str(save), *more]) == 0
    return save


def to_folder(load: Path, output: Path, *more: str) -> Path:
    assert main(["--load", str(load), "--to-hf", str(output), *more]) == 0
    return output


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_there_and_back(make: callable, tmp_path: Path) -> None:
    theirs = make()
    source = saved(theirs, tmp_path / "source", shards="15KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    save = to_checkpoint(source, tmp_path / "save")
    ours, tokenizer = load_model(save)
    assert tokenizer.vocab_size == ours.padded_vocab_size == theirs.config.vocab_size
    torch.testing.assert_close(logits(ours), logits(theirs), **LOGITS)
    directly, _ = load_model(source)
    assert torch.equal(logits(directly), logits(ours))

    back = to_folder(save, tmp_path / "back", "--max-shard-size", "20KB")
    assert len(list(back.glob("*.safetensors"))) > 2
    before, after = tensors_in(source), tensors_in(back)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    config = json.loads((source / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == config
    again = AutoModelForCausalLM.from_pretrained(back).eval()
    assert torch.equal(logits(again), logits(theirs))


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


def test_files_of_the_bare_model_and_old_constants(tmp_path: Path) -> None:
    """The first GPT-2 has no prefix and its masks saved; other programs save a tied head."""
    theirs = gpt2()
    source = saved(theirs, tmp_path / "source")
    tensors = {name.removeprefix("transformer."): t for name, t in tensors_in(source).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48).tril()
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
    found = logits(ours)
    torch.testing.assert_close(found[..., :101], logits(theirs), **LOGITS)
    assert not found[..., 101:].any()
    before, after = tensors_in(source), tensors_in(to_folder(save, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_tokenizer_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It has 12 words, the model 101 rows: the others are kept too."""
    source = saved(llama(), tmp_path / "source")
    add_tokenizer(source)
    save = to_checkpoint(source, tmp_path / "save")
    said = capsys.readouterr().out
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {save}/hugging_face" in said
    assert f"--load {save} --finetune --use-checkpoint-args" in said
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


OWN = {
    "gpt2": {},
    "llama": dict(
        normalization="RMSNorm", position_embedding_type="rope", swiglu=True, num_query_groups=2,
        disable_bias_linear=True, untie_embeddings_and_output_weights=True, rotary_base=500,
        use_rope_scaling=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", OWN.values(), ids=OWN)
def test_a_model_of_our_own(shape: dict, tmp_path: Path) -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=32, seq_length=48, layernorm_epsilon=1e-3, **shape
    )  # fmt: skip
    save, tokenizer = save_own(model, tmp_path / "save")
    back = to_folder(save, tmp_path / "back")
    theirs = AutoModelForCausalLM.from_pretrained(back).eval()
    assert theirs.config.vocab_size == tokenizer.vocab_size == 97
    ours, _ = load_model(save)
    torch.testing.assert_close(logits(ours)[..., :97], logits(theirs), **LOGITS)
    again = open_model(back)
    assert again.config.padded_vocab_size(97) == 97
    for name, tensor in again.tensors():
        assert torch.equal(tensor, open_model(save).weights.read(name)[: len(tensor)]), name


def save_own(model: ModelConfig, save: Path) -> tuple[Path, object]:
    chosen = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=97)
    tokenizer = build_tokenizer(chosen)
    gpt = GPT(model, tokenizer.vocab_size)
    initialize(gpt, 5, model)
    state = checkpoint.TrainingState(
        iteration=3, consumed_samples=3, consumed_tokens=3, seed=1, world_size=1, stage=0,
        tokenizer=tokenizer.fingerprint, architecture=architecture(model, 97),
        configuration=settings(Config(model=model, tokenizer=chosen)),
    )  # fmt: skip
    checkpoint.save(save, gpt, None, state)
    return save, tokenizer


# Memory: tensors of 4 MiB, 40 of them.


def run_and_measure(steps: list[list[str]], result: Connection) -> None:
    used = []
    for arguments in steps:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        status = main(arguments)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        used.append((status, (after - before) * 1024))
    result.send(used)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A tensor is held as read, joined and written; files of 40 MiB are never held whole."""
    sizes = dict(hidden_size=1024, intermediate_size=1024, num_hidden_layers=6, vocab_size=1024)
    heads = dict(num_attention_heads=16, num_key_value_heads=16)
    source = saved(llama(**sizes, **heads), tmp_path / "source", shards="60MB")
    total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert total > 40 * 4 * MIB
    save, back = str(tmp_path / "save"), str(tmp_path / "back")
    steps = [["--from-hf", str(source), "--save", save], ["--load", save, "--to-hf", back]]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_and_measure, args=(steps, theirs))
    process.start()
    assert ours.poll(120)
    used = ours.recv()
    process.join()
    assert [status for status, _ in used] == [0, 0]
    assert (tmp_path / "back" / ONE_FILE).stat().st_size > 40 * 4 * MIB
    # A joined matrix is 12 MiB, with its parts and what is written 36; torch's code 30 at most.
    assert max(num_bytes for _, num_bytes in used) < 70 * MIB


# Bad input


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
    assert (
        "transformer.h.1.attn.c_attn.weight has shape [96, 32], expected [32, 96]" in text
    )
    assert len(text.strip().splitlines()) == 5


def test_a_head_that_is_not_the_tied_embedding(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    change(tiny, lm_head__weight=torch.zeros(97, 32))
    assert "lm_head.weight differs from transformer.wte.weight" in import_error(tiny, capsys)


SETTINGS = {
    "model type": ({"model_type": "mamba2", "architectures": None}, "type 'mamba2' is not known"),
    "known ones": ({"model_type": "mamba2"}, "gpt2 (GPT2LMHeadModel), llama (LlamaForCausalLM)"),
    "class": ({"architectures": ["GPT2ForTokenClassification"]}, "(GPT2ForTokenClassification)"),
    "no type": ({"model_type": None}, "type None"),
    "activation": ({"activation_function": "mish"}, "activation_function 'mish' is not known"),
    "switch": ({"scale_attn_by_inverse_layer_idx": True}, "only False is known"),
    "word": ({"n_layer": "two"}, "n_layer is 'two'; expected a whole number"),
    "zero": ({"n_head": 0}, "n_head is 0"),
    "sizes": ({"n_head": 5}, "--hidden-size 32 is not divisible"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
}


@pytest.mark.parametrize(("entries", "said"), SETTINGS.values(), ids=SETTINGS)
def test_settings_we_do_not_have(
    entries: dict, said: str, tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    set_config(tiny, **entries)
    assert said in import_error(tiny, capsys)


LLAMAS = {
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' are not known"),
    "old key": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "known are default, llama3"),
    "llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
        "low_freq_factor of the llama3 scaling is 2.0; only 1.0",
    ),
    "base": ({"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta is 10000.5"),
    "part": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "biases": ({"mlp_bias": True}, "attention_bias is False, mlp_bias is True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "said"), LLAMAS.values(), ids=LLAMAS)
def test_settings_of_a_llama_we_do_not_have(
    entries: dict, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = saved(llama(), tmp_path / "source")
    set_config(source, **entries)
    assert said in import_error(source, capsys)


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


def test_numbers_of_few_bits(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    change(tiny, transformer__wpe__weight=torch.zeros(48, 32, dtype=torch.int8))
    text = import_error(tiny, capsys)
    assert "transformer.wpe.weight (I8)" in text and "dequantize" in text


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
    ("change_map", "said"),
    [
        (lambda m: m.pop("model.norm.weight"), "model.norm.weight: not where the index says"),
        (lambda m: m.update(odd=m["lm_head.weight"]), "odd: not where the index says"),
        (lambda m: m.update(odd="../x"), "'../x' is not the name of a file beside it"),
        (lambda m: m.clear(), "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(
    change_map: callable, said: str, sharded: Path, capsys: pytest.CaptureFixture
) -> None:
    path = sharded / f"{ONE_FILE}.index.json"
    index = json.loads(path.read_text())
    change_map(index["weight_map"])
    path.write_text(json.dumps(index))
    assert said in import_error(sharded, capsys)


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
    text = error_of(["--from-hf", str(save), "--save", str(tmp_path / "other")], capsys)
    assert "is a checkpoint of this program already" in text


def test_a_model_that_is_none_of_theirs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = ModelConfig(num_layers=1, hidden_size=32, position_embedding_type="rope", swiglu=True)
    save, _ = save_own(model, tmp_path / "save")
    text = error_of(["--load", str(save), "--to-hf", str(tmp_path / "back")], capsys)
    assert "gpt2: position_embedding_type is rope, not learned_absolute" in text
    assert "llama: normalization is LayerNorm, not RMSNorm" in text


@pytest.mark.parametrize(
    "arguments",
    [[], ["--from-hf", "a"], ["--load", "a", "--save", "b"],
     ["--from-hf", "a", "--save", "b", "--to-hf", "c"]],
)  # fmt: skip
def test_what_is_not_said(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
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
