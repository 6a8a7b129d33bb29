"""Mixtures of experts of Megatron-LM: recorded checkpoints in, and ours out and in again."""

from pathlib import Path

import pytest
import torch

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.open_model import load_model, open_model
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.interchange.family_flags import FLAGS_OF_MIXTURES
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import (
    answers_of,
    change,
    error_of,
    unpack,
)
from tests.megatron_zpp.interchange.foreign_models import gpt_oss, logits, save_own, saved

RECORDED = ("megatron_torch_dist_moe", "megatron_torch_dist_moe_apart", "megatron_legacy_moe")
LEGACY = Path("iter_0000003/mp_rank_00/model_optim_rng.pt")
EXPERT = "decoder.layers.1.mlp.experts.local_experts.{}.{}.weight"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 97 --num-layers 2 --hidden-size 36 "


def imported(source: Path, save: Path) -> Path:
    assert main(["--from-checkpoint", str(source), "--save", str(save)]) == 0
    return save


def assert_answers(folder: Path) -> None:
    """As of the other recorded models: rounding of fp32 on logits of order one."""
    answers = answers_of("megatron_moe")
    model, _ = load_model(folder)
    with torch.no_grad():
        output = model(answers.tokens[0][:, :-1])
    assert answers.logits.std() > 0.5
    torch.testing.assert_close(output, answers.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RECORDED)
def test_the_model_answers_as_the_writer_did(name: str, tmp_path: Path) -> None:
    """Experts in one tensor, in one each, or in a legacy file; the bias of the router counts."""
    save = imported(unpack(name, tmp_path), tmp_path / "save")
    assert_answers(save)
    model = open_model(save).config
    assert model.moe_layers == (False, True) and model.moe_router_topk_scaling_factor == 1.5
    bias = open_model(save).weights.read("blocks.1.mlp.router.expert_bias")
    assert bias.dtype == torch.float32 and bias.std() > 0.01


def test_names_of_grouped_experts(tmp_path: Path) -> None:
    """Transformer Engine's grouped layers number the weights of one module."""

    def rename(model: dict) -> None:
        for number in range(4):
            for linear in ("linear_fc1", "linear_fc2"):
                weight = model.pop(EXPERT.format(number, linear))
                model[f"decoder.layers.1.mlp.experts.{linear}.weight{number}"] = weight

    source = unpack("megatron_legacy_moe", tmp_path)
    change(source / LEGACY, lambda content: rename(content["model"]))
    assert_answers(imported(source, tmp_path / "save"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda model: model.pop(EXPERT.format(1, "linear_fc2")), "and others are missing"),
        (lambda model: model.pop(EXPERT.format(3, "linear_fc1")), "expected [4, 24, 16]"),
        (lambda model: model.update({EXPERT.format(2, "linear_fc1"): torch.ones(22, 16)}),
         "cannot be joined"),
    ],
)  # fmt: skip
def test_experts_that_are_missing(edit, message, tmp_path: Path, capsys) -> None:
    source = unpack("megatron_legacy_moe", tmp_path)
    change(source / LEGACY, lambda content: edit(content["model"]))
    assert message in error_of(capsys, source)


def test_files_of_ranks_with_some_experts_each(tmp_path: Path, capsys) -> None:
    source = unpack("megatron_legacy_moe", tmp_path)
    folder = (source / LEGACY).parent
    folder.rename(folder.with_name("mp_rank_00_000"))
    assert main(["--from-checkpoint", str(source), "--save", str(tmp_path / "one")]) == 0
    folder.with_name("mp_rank_00_000").rename(folder.with_name("mp_rank_00_000_001"))
    assert "save it with --ckpt-format torch_dist" in error_of(capsys, source)


@pytest.mark.parametrize("layers", ["", "--moe-layer-freq [0,1] "])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_export(name: str, layers: str, tmp_path: Path) -> None:
    """Layers of one kind are stacked in one tensor; others have tensors of their own."""
    flags = "--num-attention-heads 6 --seq-length 48 --init-method-std 0.3 "
    model = parse((DATA + flags + FLAGS_OF_MIXTURES[name] + layers).split(), 1).model
    save, _ = save_own(model, tmp_path / "save")
    out = tmp_path / "out"
    assert main(["--load", str(save), "--to-megatron", str(out)]) == 0
    shapes = ShardTensors(out / "release").shapes()
    experts = "mlp.experts.experts.linear_fc1.weight"
    stacked, single = f"decoder.layers.{experts}", f"decoder.layers.1.{experts}"
    size = (4, 2 * model.expert_ffn_size, 36)
    assert shapes[single if layers else stacked] == (size if layers else (2, *size))
    again = imported(out, tmp_path / "again")
    ours, theirs = load_model(save)[0], load_model(again)[0]
    assert torch.equal(logits(ours), logits(theirs))


def test_export_of_biases_and_sinks(tmp_path: Path) -> None:
    """Of experts, of their router and of attention; files of single experts have them apart."""
    theirs = gpt_oss(layer_types=["full_attention"] * 2)
    assert main(["--from-hf", str(saved(theirs, tmp_path / "hf")), "--save",
                 str(tmp_path / "save")]) == 0  # fmt: skip
    out = tmp_path / "out"
    assert main(["--load", str(tmp_path / "save"), "--to-megatron", str(out)]) == 0
    shapes = ShardTensors(out / "release").shapes()
    for name, shape in (
        ("mlp.experts.experts.linear_fc1.bias", (2, 4, 80)),
        ("mlp.experts.experts.linear_fc2.bias", (2, 4, 36)),
        ("mlp.router.bias", (2, 4)),
        ("self_attention.core_attention.softmax_offset", (2, 6)),
    ):
        assert shapes[f"decoder.layers.{name}"] == shape
    again, _ = load_model(imported(out, tmp_path / "again"))
    torch.testing.assert_close(logits(again), logits(theirs), rtol=0, atol=1e-5)


def test_what_megatron_cannot_say(tmp_path: Path, capsys) -> None:
    for name, message in (("deepseek_v3", "latent attention are not written"),
                          ("granitemoe", "--embedding-multiplier 6.0"),
                          ("gpt_oss", "--window-size 6,0")):  # fmt: skip
        flags = DATA + "--num-attention-heads 6 --seq-length 48 " + FLAGS_OF_MIXTURES[name]
        save, _ = save_own(parse(flags.split(), 1).model, tmp_path / name)
        assert main(["--load", str(save), "--to-megatron", str(tmp_path / f"{name}_out")]) == 1
        assert message in capsys.readouterr().err
