"""Opened models fill whole and sharded GPTs, and training continues from them."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_zpp.checkpoint.training_state import TrainingState, read_state
from megatron_zpp.interchange import gguf
from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.families.rope import Rotary
from megatron_zpp.interchange.hf_folder import FolderTensors, read_config
from megatron_zpp.interchange.open_model import load_model, open_model
from megatron_zpp.interchange.tokenizer_files import copy_files
from megatron_zpp.model.attention.rotary import rotary_tables
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import ModelConfig, TokenizerConfig
from megatron_zpp.text.text_model import TextModelConfig, open_text_model
from tests.megatron_zpp.interchange.foreign_models import LLAMA3, add_tokenizer, llama, saved
from tests.megatron_zpp.small_net import save_in
from tests.megatron_zpp.train.training_runs import built_run
from tests.ranks import ranks
from zeropp import ZeroConfig, shard
from zeropp.errors import InputError
from zeropp.optim.step_or_skip import local_part
from zeropp.ranks.topology import Environment


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Llama, whose sizes four ranks do not divide evenly, and its tokenizer."""
    folder = saved(llama().bfloat16(), tmp_path_factory.mktemp("llama"))
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def imported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("imported") / "save"
    import_model(source, save)
    return save


@ranks(4)
def test_shards_are_filled(source: Path, imported: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for folder in (source, imported):
        opened = open_model(folder)
        with torch.device("meta"):
            model = GPT(opened.config, opened.tokenizer.vocab_size)
        zero = ZeroConfig.from_json({"zero_optimization": {"stage": 3}})
        sharding = shard(model, mesh, zero, cast_forward_inputs=False)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            local_part(parameter).detach().fill_(torch.nan)
        opened.fill(model)
        sharding.weights_changed()
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32
            whole = parameter.full_tensor()
            assert torch.equal(whole, opened.weights.read(name).float()), name


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
@ranks(2)
def test_a_run_starts_from_an_imported_model(flag: str, imported: Path) -> None:
    flags = (
        f"--load {imported} {flag} --use-checkpoint-args --mock-data --train-iters 5 "
        "--micro-batch-size 1 --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {imported}/hugging_face"
    )
    weights = open_model(imported).weights
    with built_run(flags) as run:
        assert (run.trainer.counters.iteration, run.trainer.counters.scheduled_samples) == (0, 0)
        for name, parameter in run.trainer.sharding.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), weights.read(name).float()), name


def test_shapes_that_do_not_fit_are_named(imported: Path) -> None:
    opened = open_model(imported)
    other = ModelConfig(num_layers=1, hidden_size=36, num_attention_heads=6, seq_length=48)
    model = GPT(other, 101)
    before = model.tokens.weight.clone()
    with pytest.raises(InputError) as failure:
        opened.fill(model)
    text = str(failure.value)
    assert "only in the model: positions.weight, blocks.0.norm1.bias" in text
    assert "only in the checkpoint: blocks.0.mlp.gate.weight" in text
    assert "tokens.weight has shape [101, 36] in the checkpoint, [128, 36] in the model" in text
    assert torch.equal(model.tokens.weight, before)


def test_another_tokenizer(source: Path) -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=99)
    _, tokenizer = load_model(source, tokenizer_config=config)
    assert (tokenizer.name, tokenizer.vocab_size) == ("NullTokenizer", 99)


class FakeGguf(FolderTensors):
    """A fake GgufModel that reads a Hugging Face folder instead."""

    folder: Path

    def __init__(self, path: Path) -> None:
        super().__init__(self.folder)
        self.config = read_config(self.folder)

    def save_tokenizer(self, folder: Path) -> None:
        copy_files(self.folder, folder)


def test_the_tokenizer_of_a_gguf_lives_as_long_as_the_model(source, tmp_path, monkeypatch):
    """It is exported with the model, and its chat template is there to be used."""
    monkeypatch.setattr(FakeGguf, "folder", source, raising=False)
    monkeypatch.setattr(gguf, "GgufModel", FakeGguf)
    opened = open_model(tmp_path / "a.gguf")
    export_model(opened, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()
    model = open_text_model(
        TextModelConfig(load=str(tmp_path / "a.gguf")),
        TokenizerConfig(),
        Environment(rank=0),
        open_model,
    )
    assert (model.tokenizer_path / "chat_template.jinja").is_file()
    model.close()
    assert not model.tokenizer_path.exists()


def test_damage_is_named(imported: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(imported, tmp_path / "copied")
    (copied / "iter_0000000" / "__0_3.distcp").write_bytes(b"")
    for folder in (copied, copied / "iter_0000000"):
        with pytest.raises(InputError, match="__0_3.distcp has 0 bytes"):
            open_model(folder)


def test_a_checkpoint_with_flags_that_change_nothing(imported: Path, tmp_path: Path) -> None:
    """Earlier versions saved them as settings of the model."""
    state = read_state(imported / "iter_0000000")
    state.configuration["model"] |= {"attention_softmax_in_fp32": True}
    model, _ = load_model(imported)
    save_in(tmp_path, model, None, state)
    assert open_model(tmp_path).config == open_model(imported).config


def test_a_checkpoint_of_another_program_raises(imported: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = TrainingState(
        iteration=1, consumed_samples=0, consumed_tokens=0, seed=1, world_size=1, stage=0,
        tokenizer="",
    )  # fmt: skip
    save_in(tmp_path, model, None, state)
    with pytest.raises(InputError, match="does not describe its model"):
        open_model(tmp_path)


def test_the_scaling_of_llama_3_1_equals_transformers() -> None:
    """Both are fp32: angles up to 1 differ by a few units of 2^-24."""
    model = llama(rope_parameters=LLAMA3, head_dim=32)
    expected = model.model.rotary_emb.inv_freq
    fields = Rotary().read(model.config.to_dict(), "")
    assert fields == {
        "position_embedding_type": "rope", "rotary_base": 5000, "rotary_percent": 1.0,
        "use_rope_scaling": True, "rope_scaling_factor": 8.0,
        "rope_scaling_low_freq_factor": 1.0, "rope_scaling_high_freq_factor": 4.0,
        "rope_scaling_original_positions": 8192,
    }  # fmt: skip
    unscaled = 1 / 5000 ** (torch.arange(0, 32, 2) / 32)
    is_scaled = (expected / unscaled - 1).abs() > 1e-3
    assert 3 < is_scaled.sum() < 16
    sizes = dict(num_attention_heads=1, hidden_size=32)
    (cosines, sines), *_ = rotary_tables(ModelConfig(**sizes, **fields), torch.tensor([[1]]))
    torch.testing.assert_close(sines[0, 0, 0, 0, 16:], expected.sin(), rtol=1e-6, atol=0)
    torch.testing.assert_close(cosines[0, 0, 0, 0, 16:], expected.cos(), rtol=1e-6, atol=0)
