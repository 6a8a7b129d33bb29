"""Whole fp32 weights of an engine's checkpoint, read without its ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, run
from tests.zeropp.small_model import small_model
from zeropp import InputError
from zeropp.deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
)


class Tied(nn.Module):
    """Tied weights, a frozen one, a 0-d one, statistics of batches and a count of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Parameter(torch.ones(()))
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


@ranks(2)
def save_tied(folder: Path) -> None:
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    }
    engine, *_ = zeropp.initialize(model=Tied(), config=config)
    engine.backward(engine(torch.arange(8.0).view(2, 4) * (1 + dist.get_rank())).square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def test_tied_frozen_and_integer_tensors_of_any_file_layout(tmp_path):
    saved = tmp_path / "saved"
    save_tied(folder=saved)
    state = get_fp32_state_dict_from_zero_checkpoint(saved)
    Tied().load_state_dict(state)  # every name, every shape
    assert state["last.weight"] is state["first.weight"]
    assert state["norm.num_batches_tracked"].item() == 1
    assert torch.equal(state["first.bias"], Tied().first.bias.detach())
    assert not torch.equal(state["first.weight"], Tied().first.weight.detach())
    lazy = get_fp32_state_dict_from_zero_checkpoint(saved, lazy_mode=True)
    assert torch.equal(lazy["last.weight"].contiguous(), state["first.weight"])
    trained = get_fp32_state_dict_from_zero_checkpoint(saved, exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"first.bias"}
    one = tmp_path / "one"
    main([str(saved), str(one)])
    (path,) = one.iterdir()
    loaded = torch.load(path)
    assert path.name == "pytorch_model.bin" and all(
        torch.equal(loaded[name], value) for name, value in state.items()
    )
    several = tmp_path / "several"
    convert_zero_checkpoint_to_fp32_state_dict(saved, several, 70, safe_serialization=True)
    index = json.loads((several / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in several.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 2
    assert all((several / name).stat().st_size < 70 + 400 for name in files)  # and a header
    parts = [safetensors.torch.load_file(several / name) for name in files]
    merged = {name: value for part in parts for name, value in part.items()}
    assert state.keys() - merged.keys() == {"last.weight"}
    assert all(torch.equal(state[name], value) for name, value in merged.items())


def test_the_script_beside_a_checkpoint(tmp_path):
    save_tied(folder=tmp_path)
    output = tmp_path / "output"
    command = [sys.executable, "zero_to_fp32.py", ".", str(output), "--max_shard_size", "1GB"]
    environment = {"PYTHONPATH": str(Path(zeropp.__file__).parent.parent), "PATH": ""}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    Tied().load_state_dict(torch.load(output / "pytorch_model.bin"))
    assert (tmp_path / "zero_to_fp32.py").stat().st_mode & 0o100


@ranks(2)
def save_stored_quantized(folder: Path) -> None:
    model = small_model()
    model.blocks.requires_grad_(False)
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True}
    engine = engine_of(model, zero_optimization=zero)
    run(engine, steps=1)
    engine.save_checkpoint(folder)


def test_what_cannot_be_read_is_said_in_one_sentence(tmp_path):
    for folder, options, message in (
        (
            "nowhere",
            {},
            "latest does not exist: give the tag of a checkpoint; there is no checkpoint",
        ),
        ("here", {"tag": "other"}, "no complete checkpoint other in .*; there are global_step1"),
        ("here", {"max_shard_size": "many"}, "max_shard_size = 'many': expected a size"),
        ("theirs", {}, "is a checkpoint of DeepSpeed"),
    ):
        if folder == "here" and not (tmp_path / folder).exists():
            save_tied(folder=tmp_path / folder)
        if folder == "theirs":
            (tmp_path / "theirs/global_step1").mkdir(parents=True)
            (tmp_path / "theirs/latest").write_text("global_step1")
            (tmp_path / "theirs/global_step1/mp_rank_00_model_states.pt").touch()
            name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            (tmp_path / "theirs/global_step1" / name).touch()
        with pytest.raises(InputError, match=message):
            convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / folder, tmp_path / "output", **options
            )
    with pytest.raises(SystemExit, match="zero_to_fp32.py: .*there is no checkpoint"):
        main([str(tmp_path / "nowhere"), str(tmp_path / "output")])
    with pytest.raises(InputError, match="is of another model"):
        load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), tmp_path / "here")
    save_stored_quantized(folder=tmp_path / "stored")
    with pytest.raises(InputError, match="does not hold the frozen weights"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "stored")
    state = get_fp32_state_dict_from_zero_checkpoint(
        tmp_path / "stored", exclude_frozen_parameters=True
    )
    assert state.keys() == {"embedding.weight"}
