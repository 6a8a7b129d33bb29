"""Old, damaged and mixed states of Megatron's distributed optimizer."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_zpp.commands.convert_hf import main
from megatron_zpp.interchange.foreign.distributed_optimizer.bucket_tensors import PREFIX
from megatron_zpp.interchange.foreign.distributed_optimizer.gathered_state import KEYS
from megatron_zpp.interchange.foreign.import_checkpoint import import_checkpoint
from megatron_zpp.interchange.foreign.shard_tensors import ShardTensors
from megatron_zpp.interchange.open_model import open_model
from tests.megatron_zpp.interchange.foreign.recorded_checkpoints import (
    answers_of,
    change,
    change_metadata,
    error_of,
    next_losses,
    unpack,
)

FILES, SHARDS = "megatron_legacy_buckets_llama", "megatron_torch_dist_buckets_llama"
STAGES = "megatron_legacy_buckets_gpt2"  # 2 tensor ranks x 2 stages
FLOAT = torch.float32


@pytest.fixture
def files(tmp_path):
    return unpack(FILES, tmp_path) / "iter_0000003"


@pytest.fixture
def shards(tmp_path):
    return unpack(SHARDS, tmp_path) / "iter_0000003"


def line_of(capsys, source: Path, *flags: str) -> str:
    """Run the command, which imports the weights alone; return the line that says so."""
    save = source.parent / "ours"
    assert main(["--from-checkpoint", str(source), "--save", str(save), *flags]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Adam's state" in line)
    return line


def vectors(content: dict) -> dict:
    """The vectors of the only chunk and dtype."""
    return next(iter(content[0].values()))


def state_file(folder: Path, rank: str = "mp_rank_00") -> Path:
    return folder / rank / "distrib_optim.pt"


def bucket(rank: int, number: int, key: str) -> str:
    """The name of a tensor."""
    dtype = "(torch.bfloat16, torch.float32)"
    return f"{PREFIX}{rank}.gbuf_idx_0.dtype_{dtype}.bucket_idx_{number}.{key}"


def answers_are_right(source: Path, name: str) -> bool:
    save = source.parent / "ours"
    import_checkpoint(source, save)
    answers = answers_of(name)
    return next_losses(save, answers) == pytest.approx(answers.losses, abs=1e-5)


def test_buckets_of_their_own_as_before_mid_2024(files, shards):
    tensors = ShardTensors(shards)
    for rank, path in enumerate(sorted(files.glob("*/distrib_optim.pt"))):
        numels, padded = (
            tensors.pickled(f"{PREFIX}{rank}.{key}/shard_0_1")[0]
            for key in ("per_bucket_numel_unpadded", "per_bucket_numel")
        )
        ((unpadded,), (full,)) = numels.values(), padded.values()
        assert len(full) > 1

        def as_before(content, unpadded=unpadded, full=full):
            old = {
                "per_bucket_numel": [{FLOAT: full}],
                "per_bucket_numel_unpadded": [{FLOAT: unpadded}],
            }
            by_key = {}
            for key in KEYS:
                pieces = vectors(content)[key].split(unpadded)
                by_key[key] = [
                    torch.cat([piece, torch.full((size - len(piece),), 5.0)])
                    for piece, size in zip(pieces, full, strict=True)
                ]
            return old | {0: {FLOAT: by_key}}

        torch.save(as_before(torch.load(path)), path)
    assert answers_are_right(files, "megatron_legacy_llama")


def test_buckets_with_their_padding_as_until_core_0_14(shards):
    tensors = ShardTensors(shards)

    def pad(metadata):
        for rank in (0, 1):
            numels = tensors.pickled(f"{PREFIX}{rank}.per_bucket_numel/shard_0_1")[0]
            for number, numel in enumerate(*numels.values()):
                for key in KEYS:
                    metadata.state_dict_metadata[bucket(rank, number, key)].size = torch.Size(
                        [numel]
                    )

    change_metadata(shards, pad)
    assert answers_are_right(shards, "megatron_torch_dist_llama")


def test_weights_without_a_state(files, capsys):
    for path in files.glob("*/distrib_optim.pt"):
        path.unlink()
    assert "whose distrib_optim.pt is not there" in line_of(capsys, files)
    shutil.rmtree(files.parent / "ours")
    assert line_of(capsys, files, "--no-load-optim").endswith("not asked for (--no-load-optim)")


def test_vectors_that_contradict_what_is_said_of_them(files, capsys):
    path = state_file(files)
    change(path, lambda content: vectors(content).update(exp_avg=torch.ones(3000)))
    text = error_of(capsys, files)
    assert f"{path}: exp_avg has 3,000 numbers, but says that it has 3," in text
    assert "--no-load-optim imports the weights alone" in text


def test_files_of_another_stage_rank_or_iteration(files, tmp_path, capsys):
    first, second = state_file(files), state_file(files, "mp_rank_01")
    shutil.copy(first, second)
    assert "is not what the optimizer keeps of it in fp32" in error_of(capsys, files)
    change(second, lambda content: content.update({1: content[0]}))
    assert "has 1, 2 model chunks on its ranks: mixed up" in error_of(capsys, files)
    change(first, lambda content: content.update({1: content[0]}))
    text = error_of(capsys, files)
    assert "has the state of 2 model chunks, but the model has 1" in text
    stages = unpack(STAGES, tmp_path) / "iter_0000003"
    shutil.copy(state_file(stages, "mp_rank_00_000"), state_file(stages, "mp_rank_00_001"))
    text = error_of(capsys, stages)
    assert f"{state_file(stages, 'mp_rank_00_001')}: has not as many numbers as" in text


def test_weights_alone_are_the_models_own(files, tmp_path):
    change(state_file(files), lambda content: vectors(content).update(param=torch.ones(1)))
    import_checkpoint(files, tmp_path / "alone", load_optimizer=False)
    weights = dict(open_model(tmp_path / "alone").tensors())
    path = files / "mp_rank_00/model_optim_rng.pt"
    norm = torch.load(path, weights_only=False)["model"]["decoder.final_layernorm.weight"]
    assert torch.equal(weights["norm.weight"], norm)
    assert all(weight.dtype == torch.bfloat16 for weight in weights.values())


def places_in(content, prefix=()):
    """Yield the keys that lead to each entry of nested dicts and lists."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*prefix, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*prefix, key))


@pytest.mark.parametrize("seed", range(12))
def test_random_changes_are_errors_or_change_nothing(seed, files, capsys):
    draw, path = random.Random(seed), state_file(files)
    content = torch.load(path)
    *keys, last = draw.choice(list(places_in(content)))
    parent = content
    for key in keys:
        parent = parent[key]
    if draw.random() < 0.3:
        del parent[last]
    else:
        parent[last] = draw.choice([None, 3, "x", [], {}, [1], torch.ones(5), torch.ones(2, 2)])
    torch.save(content, path)
    if main(["--from-checkpoint", str(files), "--save", str(files.parent / "ours")]):
        assert capsys.readouterr().err.startswith("error: ")
    else:
        out = capsys.readouterr().out
        assert "without Adam's state: " in out or (keys, last) == ([], "buckets_coalesced")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [(lambda content: [content], "it is that of several optimizers"),
     (lambda content: {0: {FLOAT: {key: [] for key in KEYS}}}, "before 2024 does not say how long"),
     (lambda content: {**content, 0: {(torch.uint8, FLOAT): vectors(content)}}, "8-bit numbers"),
     (lambda content: {**content, 0: {**content[0], FLOAT: vectors(content)}}, "several dtypes"),
     (lambda content: {**content, 0: {FLOAT: {"momentum": torch.ones(3)}}}, "so it is not Adam")],
)  # fmt: skip
def test_states_that_do_not_say_what_lies_where_are_left_out(edit, expected, files, capsys):
    for path in files.glob("*/distrib_optim.pt"):
        torch.save(edit(torch.load(path)), path)
    line = line_of(capsys, files)
    assert line.startswith("without Adam's state: ") and expected in line


def test_tensors_of_buckets_that_are_missing_or_of_other_lengths(shards, capsys):
    name = bucket(1, 1, "exp_avg_sq")

    def shorten(metadata):
        entry = metadata.state_dict_metadata[name]
        entry.size = torch.Size([entry.size[0] - 64])

    change_metadata(shards, shorten)
    text = error_of(capsys, shards)
    assert f"{name} has shape [" in text and "--no-load-optim" in text
    change_metadata(shards, lambda metadata: metadata.state_dict_metadata.pop(name))
    assert "tensors of the distributed optimizer's rank 1, but says that there are" in error_of(
        capsys, shards
    )

    def rank_0_alone(metadata):
        for key in [key for key in metadata.state_dict_metadata if key.startswith(f"{PREFIX}1.g")]:
            del metadata.state_dict_metadata[key]

    change_metadata(shards, rank_0_alone)
    text = error_of(capsys, shards)
    assert (
        "2 tensor ranks x 1 pipeline stages, but has the distributed optimizer's state of 1" in text
    )


def test_shards_that_are_mixed_up(shards, capsys):
    def mix(metadata):
        for key in KEYS:
            parts = [
                [index for index in metadata.storage_data if index.fqn == bucket(rank, 0, key)]
                for rank in (0, 1)
            ]
            for one, other in zip(
                *(sorted(each, key=lambda i: i.offset) for each in parts), strict=True
            ):
                assert one.offset == other.offset
                stored = metadata.storage_data
                stored[one], stored[other] = stored[other], stored[one]

    change_metadata(shards, mix)
    assert "is not what the optimizer keeps of it in fp32" in error_of(capsys, shards)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"tensor_model_parallel_size": 4}, "4 tensor ranks x 1 pipeline stages, but has the"),
     ({"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
      "are not those of the model's parameters on 1 tensor ranks x 2 pipeline stages"),
     ({"tensor_model_parallel_size": 5}, "cannot be split for the 5 tensor ranks")],
)  # fmt: skip
def test_arguments_of_other_ranks(settings, expected, shards, capsys):
    if settings["tensor_model_parallel_size"] == 5:
        change_metadata(shards, lambda metadata: add_ranks(metadata, 5))

    def edit(content):
        vars(content["args"]).update(settings)

    change(shards / "common.pt", edit)
    assert expected in error_of(capsys, shards)


def add_ranks(metadata, number: int) -> None:
    """Copy what is known of rank 1 to further ranks."""
    for name in [name for name in metadata.state_dict_metadata if name.startswith(f"{PREFIX}1.")]:
        for rank in range(2, number):
            new = name.replace(f"{PREFIX}1.", f"{PREFIX}{rank}.", 1)
            metadata.state_dict_metadata[new] = metadata.state_dict_metadata[name]
            for index in [index for index in metadata.storage_data if index.fqn == name]:
                stored = metadata.storage_data[index]
                metadata.storage_data[replace(index, fqn=new)] = stored


def test_several_optimizers_in_one_checkpoint_are_left_out(shards, capsys):
    def rename(metadata):
        for name in [name for name in metadata.state_dict_metadata if name.startswith(PREFIX)]:
            entry = metadata.state_dict_metadata.pop(name)
            metadata.state_dict_metadata[f"chained_0.{name}"] = entry

    change_metadata(shards, rename)
    assert "it is that of several optimizers" in line_of(capsys, shards)


def test_an_object_that_is_not_in_the_metadata(shards, capsys):
    name = f"{PREFIX}0.per_bucket_numel/shard_0_1"
    change_metadata(shards, lambda metadata: metadata.storage_data.pop(MetadataIndex(name)))
    assert f"{name}: missing in its metadata" in error_of(capsys, shards)
