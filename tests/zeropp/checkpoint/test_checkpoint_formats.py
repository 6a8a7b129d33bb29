"""Checkpoints of other programs are recognised by their files, and named in the error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zeropp
from tests.ranks import ranks
from zeropp.checkpoint.checkpoint_formats import find_format, format_of

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def write(path: Path, content: object = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content or {"weight": torch.ones(2)}, path)


def write_dcp(folder: Path) -> None:
    """What torch.distributed.checkpoint writes, as torchtitan and Megatron-LM let it."""
    folder.mkdir(parents=True)
    dcp.save({"tok_embeddings.weight": torch.ones(4, 2)}, checkpoint_id=folder, no_dist=True)


def megatron_torch_dist(folder: Path) -> Path:
    checkpoint = folder / "iter_0000010"
    write_dcp(checkpoint)
    write(checkpoint / "common.pt", {"args": {}})
    facts = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (checkpoint / "metadata.json").write_text(json.dumps(facts))
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return checkpoint


def megatron_core_19(folder: Path) -> Path:
    checkpoint = megatron_torch_dist(folder)
    (checkpoint / "common.pt").unlink()
    return checkpoint


def megatron_bridge(folder: Path) -> Path:
    checkpoint = megatron_torch_dist(folder)
    (checkpoint / "run_config.yaml").write_text("model:\n  num_layers: 2\n")
    return checkpoint


def megatron_zarr(folder: Path) -> Path:
    checkpoint = folder / "iter_0000010"
    write(checkpoint / "common.pt")
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return checkpoint


def megatron_legacy(folder: Path) -> Path:
    checkpoint = folder / "iter_0000010"
    for part in ("mp_rank_00_000", "mp_rank_00_001"):
        write(checkpoint / part / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    return checkpoint


def megatron_release(folder: Path) -> Path:
    write(folder / "release/mp_rank_00/model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder / "release"


def deepspeed_zero_2(folder: Path) -> Path:
    checkpoint = folder / "global_step10"
    write(checkpoint / "mp_rank_00_model_states.pt")
    for rank in range(2):
        write(checkpoint / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step10")
    return checkpoint


def deepspeed_zero_3(folder: Path) -> Path:
    checkpoint = folder / "a_tag"
    for rank in range(2):
        write(checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        write(checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("a_tag")
    return checkpoint


def deepspeed_zero_0(folder: Path) -> Path:
    checkpoint = folder / "global_step10"
    write(checkpoint / "mp_rank_00_model_states.pt")
    write(checkpoint / "layer_00-model_00-model_states.pt")
    return checkpoint


def deepspeed_universal(folder: Path) -> Path:
    checkpoint = folder / "global_step10_universal"
    write(checkpoint / "zero/word_embeddings.weight/fp32.pt")
    write(checkpoint / "zero/word_embeddings.weight/exp_avg.pt")
    write(checkpoint / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text("global_step10_universal")
    return checkpoint


def torchtitan(folder: Path) -> Path:
    checkpoint = folder / "checkpoint/step-100"
    write_dcp(checkpoint)
    return checkpoint


def hugging_face(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


Write = Callable[[Path], Path]
FORMATS: list[tuple[Write, str]] = [
    (megatron_torch_dist, "a checkpoint of Megatron-LM, in its torch_dist format"),
    (megatron_core_19, "a checkpoint of Megatron-LM, in its torch_dist format"),
    (megatron_bridge, "a checkpoint of Megatron Bridge"),
    (megatron_zarr, "a checkpoint of Megatron-LM, in a format of megatron.core"),
    (megatron_legacy, "a checkpoint of Megatron-LM, in its legacy format (mp_rank_XX)"),
    (megatron_release, "a checkpoint of Megatron-LM, in its legacy format (mp_rank_XX)"),
    (deepspeed_zero_2, "a checkpoint of DeepSpeed, sharded by ZeRO"),
    (deepspeed_zero_3, "a checkpoint of DeepSpeed, sharded by ZeRO"),
    (deepspeed_zero_0, "a checkpoint of DeepSpeed"),
    (deepspeed_universal, "a checkpoint of DeepSpeed, in its universal format"),
    (torchtitan, "a checkpoint of torchtitan, or of another program"),
    (hugging_face, "a model in Hugging Face's format"),
]


@pytest.mark.parametrize(("write_checkpoint", "name"), FORMATS)
def test_a_format_is_recognised_in_its_folder_and_by_itself(write_checkpoint, name, tmp_path):
    checkpoint = write_checkpoint(tmp_path)
    for place in (tmp_path, checkpoint):
        path, found = find_format(place)
        assert path == checkpoint and found.name.startswith(name)


def test_other_folders_have_no_known_format(tmp_path):
    assert find_format(tmp_path) is None
    (tmp_path / "latest").write_text("../elsewhere\n")
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert find_format(tmp_path) is None and format_of(tmp_path / "absent") is None
    assert find_format(tmp_path / "absent") is None


@ranks(1)
def test_an_engine_says_whose_checkpoint_it_is(tmp_path):
    engine, *_ = zeropp.initialize(model=torch.nn.Linear(2, 2), config=CONFIG)
    for number, (write_checkpoint, name) in enumerate(FORMATS):
        folder = tmp_path / str(number)
        folder.mkdir()
        checkpoint = write_checkpoint(folder)
        with pytest.raises(zeropp.InputError) as caught:
            engine.load_checkpoint(folder)
        message = str(caught.value)
        assert name in message and str(checkpoint) in message and "from_pretrained" in message


@ranks(1)
def test_an_engine_knows_its_own_and_that_of_pretrain_gpt(tmp_path):
    engine, *_ = zeropp.initialize(model=torch.nn.Linear(2, 2), config=CONFIG)
    own = engine.save_checkpoint(tmp_path / "own", tag="first")
    assert own and engine.load_checkpoint(tmp_path / "own")[0] is not None
    write_dcp(tmp_path / "run/iter_0000010")
    for name in ("manifest.json", "state.json"):
        (tmp_path / "run/iter_0000010" / name).write_text("{}")
    with pytest.raises(zeropp.InputError, match="a checkpoint of pretrain_gpt.py.*load it with"):
        engine.load_checkpoint(tmp_path / "run")
