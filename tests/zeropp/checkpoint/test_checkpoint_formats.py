"""Checkpoints of other programs are recognised by their files, and named in the error."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zeropp
from tests.ranks import ranks
from zeropp.checkpoint.checkpoint_formats import find_format, format_of

CONFIG = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


TORCH, DCP = object(), object()  # what torch.save and torch.distributed.checkpoint write
MEGATRON, DEEPSPEED = "a checkpoint of Megatron-LM, in ", "a checkpoint of DeepSpeed"
DIST = {"": DCP, "metadata.json": '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'}
ITERATION = {"latest_checkpointed_iteration.txt": "10"}
# Of each format: its name, the folder of a checkpoint, what is in it, and what is beside it.
FORMATS: list[tuple[str, str, dict[str, object], dict[str, str]]] = [
    (f"{MEGATRON}its torch_dist format", "iter_0000010", DIST | {"common.pt": TORCH}, ITERATION),
    (f"{MEGATRON}its torch_dist format", "iter_0000010", DIST, ITERATION),  # of megatron.core 0.19
    (
        "a checkpoint of Megatron Bridge", "iter_0000010",
        DIST | {"common.pt": TORCH, "run_config.yaml": "model:\n  num_layers: 2\n"}, ITERATION,
    ),
    (
        f"{MEGATRON}a format of megatron.core", "iter_0000010",
        {"common.pt": TORCH, "metadata.json": '{"sharded_backend": "zarr"}'}, {},
    ),
    (
        f"{MEGATRON}its legacy format (mp_rank_XX)", "iter_0000010",
        {f"mp_rank_00_00{part}/model_optim_rng.pt": TORCH for part in range(2)}, ITERATION,
    ),
    (
        f"{MEGATRON}its legacy format (mp_rank_XX)", "release",
        {"mp_rank_00/model_optim_rng.pt": TORCH}, dict.fromkeys(ITERATION, "release"),
    ),
    (
        f"{DEEPSPEED}, sharded by ZeRO", "global_step10",
        {"mp_rank_00_model_states.pt": TORCH}
        | {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": TORCH for rank in range(2)},
        {"latest": "global_step10"},
    ),
    (
        f"{DEEPSPEED}, sharded by ZeRO", "a_tag",
        {f"zero_pp_rank_{rank}_mp_rank_00_{of}_states.pt": TORCH
         for rank in range(2) for of in ("model", "optim")},
        {"latest": "a_tag"},
    ),
    (
        DEEPSPEED, "global_step10",
        {"mp_rank_00_model_states.pt": TORCH, "layer_00-model_00-model_states.pt": TORCH}, {},
    ),
    (
        f"{DEEPSPEED}, in its universal format", "step10_universal",
        {f"zero/word_embeddings.weight/{name}.pt": TORCH for name in ("fp32", "exp_avg")}
        | {"mp_rank_00_model_states.pt": TORCH}, {"latest_universal": "step10_universal"},
    ),
    ("a checkpoint of torchtitan, or of another program", "checkpoint/step-100", {"": DCP}, {}),
    (
        "a model in Hugging Face's format", "",
        {"config.json": '{"model_type": "llama"}', "model.safetensors": ""}, {},
    ),
]  # fmt: skip


def write_dcp(folder: Path) -> None:
    """What torch.distributed.checkpoint writes, as torchtitan and Megatron-LM let it."""
    dcp.save({"tok_embeddings.weight": torch.ones(4, 2)}, checkpoint_id=folder, no_dist=True)


def write(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is DCP:
            write_dcp(folder / name)
        elif content is TORCH:
            torch.save({"weight": torch.ones(2)}, folder / name)
        else:
            (folder / name).write_text(content)


def write_checkpoint(folder: Path, place: str, inside: dict, beside: dict) -> Path:
    """A checkpoint of a format in a folder; returns its own."""
    checkpoint = folder / place
    write(checkpoint, inside)
    write(folder, beside)
    return checkpoint


@pytest.mark.parametrize(("name", "place", "inside", "beside"), FORMATS)
def test_a_format_is_recognised_in_its_folder_and_by_itself(name, place, inside, beside, tmp_path):
    checkpoint = write_checkpoint(tmp_path, place, inside, beside)
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
    for number, (name, *files) in enumerate(FORMATS):
        folder = tmp_path / str(number)
        checkpoint = write_checkpoint(folder, *files)
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
