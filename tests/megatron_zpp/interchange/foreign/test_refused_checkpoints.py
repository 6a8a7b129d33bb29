"""Truncated, mixed, incomplete and malicious checkpoints of other programs are refused in words."""

import io
import os
import pickle
import random
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.pickles import load_metadata, load_pickle
from megatron_zpp.interchange.foreign.tensor_files import MOMENTUM, NOT_TAKEN
from megatron_zpp.interchange.foreign.zero_files import STAGES_1_2
from megatron_zpp.interchange.open_model import open_model
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import (
    change,
    change_metadata,
    error_of,
    unpack,
    weights_of,
)

TORCH_DIST, LEGACY = "megatron_torch_dist_gpt2", "megatron_legacy_gpt2"
ZERO_2, ZERO_3 = "deepspeed_zero2_gpt2", "deepspeed_zero3_llama"
CORE_19, UNIVERSAL_3 = "megatron_core19_gpt2", "deepspeed_universal_bf16"
COMMON_STATE = "common_state/shard_0_1"
UNIVERSAL, TITAN = "deepspeed_universal_gpt2", "torchtitan_llama"
BUCKETS, EXPERTS = "megatron_legacy_buckets_llama", "megatron_legacy_moe"


class Attack:
    """Unpickled by pickle.load, it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def state_of(source: Path) -> Path:
    """The file of the optimizer's state of the second rank."""
    return source / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [(TORCH_DIST, "iter*/common.pt"), (TORCH_DIST, "iter*/.metadata"),
     (TORCH_DIST, "iter*/__1_0.distcp"), (CORE_19, "iter*/.metadata"),
     (CORE_19, "iter*/__0_0.distcp"), (UNIVERSAL_3, "*/zero/*word_embeddings.weight/fp32.pt"),
     (LEGACY, "iter*/mp_rank_01_001/*.pt"),
     (ZERO_2, "*/zero_pp_rank_1*"), (ZERO_3, "*/zero_pp_rank_0_*model_states.pt"),
     (UNIVERSAL, "*/zero/*word_embeddings.weight/exp_avg.pt"), (TITAN, "*/*/__0_0.distcp"),
     (BUCKETS, "iter*/mp_rank_01/distrib_optim.pt")],
)  # fmt: skip
def test_a_truncated_file_is_called_damaged(name, pattern, tmp_path, capsys):
    source = unpack(name, tmp_path)
    (path,) = source.glob(pattern)
    path.write_bytes(path.read_bytes()[:-500])
    flags = ("--num-attention-heads", "4", "--rotary-base", "500000") if name == TITAN else ()
    text = error_of(capsys, source, *flags)
    assert str(path) in text and "is damaged" in text


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [(TORCH_DIST, "iter*/__1_0.distcp", "__1_0.distcp: named in its metadata and missing"),
     (TORCH_DIST, "iter*/common.pt", "common.pt: missing, and there is no common_state"),
     (CORE_19, "iter*/__1_0.distcp", "__1_0.distcp: named in its metadata and missing"),
     (CORE_19, "iter*/metadata.json", "metadata.json, which it writes last, is missing"),
     (UNIVERSAL_3, "*/zero/optimizer_state.pt", "says how many updates were made"),
     (LEGACY, "iter*/mp_rank_01_000", "2 tensor ranks x 2 pipeline stages, and tensor rank 1"),
     (ZERO_2, "*/zero_pp_rank_1*", "2 data-parallel x 1 tensor ranks, and the files of zero_pp_ra"),
     (ZERO_3, "*/*rank_1*optim_states.pt", "copy those of all ranks"),
     (UNIVERSAL, "*/mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt is missing"),
     (UNIVERSAL, "*/zero/*word_embeddings.weight/exp_avg.pt", "exp_avg.pt: missing"),
     (UNIVERSAL, "*/zero/*layers.1.mlp.linear_fc2.bias", "missing: decoder.layers.1.mlp.linear_"),
     (BUCKETS, "iter*/mp_rank_01/distrib_optim.pt", "missing, with the state of the distributed")],
)  # fmt: skip
def test_missing_ranks_and_files_are_named(name, pattern, expected, tmp_path, capsys):
    source = unpack(name, tmp_path)
    (path,) = source.glob(pattern)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert expected in error_of(capsys, source)


def test_files_of_other_iterations_ranks_and_models_are_noticed(tmp_path, capsys):
    source = unpack(LEGACY, tmp_path)
    path = source / "iter_0000003/mp_rank_01_001/model_optim_rng.pt"
    change(path, lambda content: content.update(iteration=4))
    assert "are of iterations [3, 4]: mixed up" in error_of(capsys, source)
    other = unpack("megatron_legacy_llama", tmp_path) / "iter_0000003/mp_rank_01/model_optim_rng.pt"
    shutil.copy(other, path)
    assert "not of one checkpoint" in error_of(capsys, source)
    zero = unpack(ZERO_2, tmp_path)
    shutil.copy(state_of(unpack(ZERO_3, tmp_path)), state_of(zero))
    assert "7,424 numbers together, but its parameters 7,936" in error_of(capsys, zero)
    torch.save({"ds_version": "0.19.8"}, state_of(zero))
    assert "not laid out as those of its program" in error_of(capsys, zero)


def test_sizes_that_cannot_be_merged(tmp_path, capsys):
    source = unpack(LEGACY, tmp_path)
    path = source / "iter_0000003/mp_rank_01_000/model_optim_rng.pt"
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    change(path, lambda content: content["model"].update({name: torch.ones(15, 32)}))
    text = error_of(capsys, source)
    assert f"{name} of 2 ranks: parts of shapes [16, 32], [15, 32] cannot be joined" in text
    zero = unpack(ZERO_2, tmp_path)
    path = zero / "global_step3/mp_rank_00_model_states.pt"
    shape = {"language_model.embedding.word_embeddings.weight": torch.Size([9600, 16])}
    change(path, lambda content: content["param_shapes"][0].update(shape))
    assert "numbers together, but its parameters" in error_of(capsys, zero)


def test_settings_that_do_not_describe_the_tensors(tmp_path, capsys):
    source = unpack(TORCH_DIST, tmp_path)
    path = source / "iter_0000003/common.pt"
    for name, value, expected in (
        ("num_layers", 3, "missing: decoder.layers.2."),
        ("num_layers", 9999, "cannot be the 9,999 layers"),
        ("num_layers", 10**9, "--num-layers 1000000000: expected at most 10000"),
        ("hidden_size", "16", "hidden-size"),
        ("num_experts", 8, "missing: decoder.layers.0.mlp.experts"),
        ("num_experts", [8], "--num-experts is [8]: experts of DeepSpeed"),
        ("hybrid_layer_pattern", "M*-", "--hybrid-layer-pattern is 'M*-'"),
        ("use_mup", True, "the multipliers of muP"),
        ("softmax_type", "learnable", "core_attention.softmax_offset"),
        ("rotary_base", "often", "not laid out as those of its program"),
        ("position_embedding_type", "mrope", "--position-embedding-type 'mrope'"),
    ):
        original = path.read_bytes()
        change(path, lambda content, n=name, v=value: setattr(content["args"], n, v))
        assert expected in error_of(capsys, source)
        path.write_bytes(original)
    change(path, lambda content: content.update(args=[1]))
    assert "no arguments are where they are" in error_of(capsys, source)
    change(path, lambda content: content.pop("args"))
    assert "has no arguments of Megatron" in error_of(capsys, source)


def common_state(source: Path) -> tuple[Path, int, int]:
    """Return the file of the object that ranks share, where it begins in it and how long it is."""
    folder = source / "iter_0000003"
    info = load_metadata(folder).storage_data[MetadataIndex(COMMON_STATE)]
    return folder / info.relative_path, info.offset, info.length


def replace_common_state(source: Path, content) -> None:
    """Put another object behind the file's end, and let the metadata name that."""
    path, _, _ = common_state(source)
    offset, pickled = path.stat().st_size, io.BytesIO()
    torch.save(content, pickled)
    path.write_bytes(path.read_bytes() + pickled.getvalue())
    metadata = load_metadata(path.parent)
    info = metadata.storage_data[MetadataIndex(COMMON_STATE)]
    info.offset, info.length = offset, len(pickled.getvalue())
    (path.parent / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_common_state_that_is_none_or_would_call_something(tmp_path, capsys):
    source, harmed = unpack(CORE_19, tmp_path), tmp_path / "harmed"
    path = common_state(source)[0]
    for content, expected in (
        ([{"args": Namespace(), "attack": Attack(harmed)}], "unpickling it would call posix.mkdir"),
        ([{"args": [1]}], f"{COMMON_STATE}: is not laid out as Megatron's"),
        ([3], f"{COMMON_STATE}: is not laid out as Megatron's"),
        ([], "not laid out as those of its program"),
        ([{"iteration": 3}], "has no arguments of Megatron"),
    ):
        replace_common_state(source, content)
        text = error_of(capsys, source)
        assert str(path.parent) in text and expected in text
    assert not harmed.exists()


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_in_a_common_state_are_errors_or_change_nothing(seed, tmp_path, capsys):
    source, draw = unpack(CORE_19, tmp_path), random.Random(seed)
    path, start, length = common_state(source)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 20])):
        content[start + draw.randrange(length)] = draw.randrange(256)
    path.write_bytes(content)
    if main(["--from-checkpoint", str(source), "--save", str(tmp_path / "ours")]):
        assert capsys.readouterr().err.startswith("error: ")
    else:
        weights = dict(open_model(tmp_path / "ours").tensors())
        expected = weights_of(unpack(CORE_19, tmp_path / "again"), tmp_path / "expected")
        assert all(torch.equal(weights[name], each) for name, each in expected.items())


def test_a_flat_parameter_of_another_length(tmp_path, capsys):
    source = unpack(UNIVERSAL_3, tmp_path)
    (path,) = source.glob("*/zero/*layers.0.mlp.linear_fc1.weight/exp_avg.pt")
    torch.save(torch.ones(767), path)
    text = error_of(capsys, source)
    assert f"{path}: holds 767 numbers, but the parameter of shape [48, 16] has 768" in text


def in_a_chain(metadata: Metadata) -> None:
    old, new = "optimizer.state.exp_avg.", f"chained_0.optimizer.state.{MOMENTUM}."
    kept, places = metadata.state_dict_metadata, metadata.storage_data
    metadata.state_dict_metadata = {key.replace(old, new): kept[key] for key in kept}
    metadata.storage_data = {
        replace(key, fqn=key.fqn.replace(old, new)): places[key] for key in places
    }


def with_muons_state(name: str, folder: Path) -> Path:
    """A recorded checkpoint in which matrices have Muon's state, as the program saves it."""
    source = unpack(name, folder)
    if name == TORCH_DIST:  # a chain of Muon and Adam
        change_metadata(source / "iter_0000003", in_a_chain)
    for path in source.glob("iter*/mp_rank*/*.pt") if name == LEGACY else ():
        content = load_pickle(path)
        adam = content["optimizer"]
        state = {key: {MOMENTUM: each["exp_avg"]} for key, each in adam["state"].items()}
        content["optimizer"] = [{"optimizer": {**adam, "state": state}}, {"optimizer": adam}]
        save_again(content, path)
    for path in source.glob("*/*optim_states.pt") if name == ZERO_2 else ():
        content = load_pickle(path)["optimizer_state_dict"]
        kept = {key: content[key] for key in ("base_optimizer_state", STAGES_1_2)}
        state = kept["base_optimizer_state"]["state"]
        state[0] = {MOMENTUM: state[0]["exp_avg"]}
        save_again({"optimizer_state_dict": kept}, path)
    return source


def save_again(content: object, path: Path) -> None:
    """Write what may be mapped from the file that it replaces."""
    new = path.with_suffix(".new")
    torch.save(content, new)
    new.replace(path)


@pytest.mark.parametrize("name", [TORCH_DIST, LEGACY, ZERO_2])
def test_muons_state_is_left_out_by_name(name, tmp_path, capsys):
    """Megatron's weights are imported with a line, ZeRO's with the flag that the error names."""
    source = with_muons_state(name, tmp_path)
    flags = ["--from-checkpoint", str(source), "--save"]
    if name == ZERO_2:
        text = error_of(capsys, source)
        assert f"{NOT_TAKEN}; --no-load-optim imports the weights alone" in text
        flags = ["--no-load-optim", *flags]
    assert main([*flags, str(tmp_path / "ours")]) == 0
    said = "it was not asked for" if name == ZERO_2 else NOT_TAKEN
    assert f"without Adam's state: {said}" in capsys.readouterr().out
    expected = weights_of(unpack(name, tmp_path / "again"), tmp_path / "expected")
    weights = dict(open_model(tmp_path / "ours").tensors())
    assert all(torch.equal(weights[key], each) for key, each in expected.items())


@pytest.mark.parametrize(
    ("name", "file"),
    [(TORCH_DIST, "iter_0000003/common.pt"),
     (LEGACY, "iter_0000003/mp_rank_00_000/model_optim_rng.pt"),
     (ZERO_2, "global_step3/mp_rank_00_model_states.pt")],
)  # fmt: skip
def test_a_pickle_that_would_call_something_is_not_read(name, file, tmp_path, capsys):
    source, harmed = unpack(name, tmp_path), tmp_path / "harmed"
    torch.save({"args": Namespace(), "attack": Attack(harmed)}, source / file)
    text = error_of(capsys, source)
    assert str(source / file) in text and "unpickling it would call posix.mkdir" in text
    assert not harmed.exists()


def test_metadata_that_would_call_something_is_not_read(tmp_path, capsys):
    source, harmed = unpack(TITAN, tmp_path), tmp_path / "harmed"
    path = source / "checkpoint/step-3/.metadata"
    path.write_bytes(pickle.dumps(Attack(harmed)))
    text = error_of(capsys, source)
    assert str(path) in text and "unpickling it would call posix.mkdir" in text
    assert not harmed.exists()
    path.write_bytes(pickle.dumps({"tensors": 1}))
    assert "holds a dict instead of the metadata" in error_of(capsys, source)


def test_torchtitan_needs_flags_that_fit_and_others_none(tmp_path, capsys):
    source = unpack(TITAN, tmp_path)
    assert "give --num-attention-heads and --rotary-base" in error_of(capsys, source)
    flags = ("--rotary-base", "500000", "--num-attention-heads")
    assert "does not fit 16 rows of queries" in error_of(capsys, source, *flags, "5")
    other = unpack(TORCH_DIST, tmp_path)
    assert "says itself what its model is" in error_of(capsys, other, *flags, "4")


def test_folders_without_a_checkpoint_that_is_imported(tmp_path, capsys):
    assert "holds no checkpoint of Megatron-LM" in error_of(capsys, tmp_path)
    source = unpack(TORCH_DIST, tmp_path)
    (source / "iter_0000003/run_config.yaml").write_text("")
    assert "is a checkpoint of Megatron Bridge" in error_of(capsys, source)
