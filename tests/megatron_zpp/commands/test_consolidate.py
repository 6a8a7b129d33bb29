"""Consolidated files: values, dtypes, shards, memory use, and bad input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from megatron_zpp.commands.consolidate import main
from tests.megatron_zpp.small_net import build, save_in, save_on_four, state_at

MIB = 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_on_four(folder=folder, stage=3, iterations=(1, 2), keep=None)
    return folder


@pytest.fixture(scope="module")
def weights(saved: Path) -> dict[str, torch.Tensor]:
    """The tensors of iteration 2 by name, whole; the tied one once."""
    expected = torch.load(saved / "expected_2.pt")
    tensors = {n.removeprefix("model."): t for n, t in expected.items() if n.startswith("model.")}
    del tensors["tied.weight"]
    return tensors


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_values_and_types(name, saved, weights, tmp_path):
    output = tmp_path / "out" / "gpt.safetensors"
    assert main(["--load", str(saved), "--output", str(output), "--dtype", name]) == 0
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    tensors = load_file(output)
    assert tensors.keys() == weights.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == dtype and torch.equal(tensor, weights[key].to(dtype)), key
    with safe_open(output, "pt") as file:
        assert file.metadata() == {"format": "pt", "iteration": "2"}
    assert [path.name for path in output.parent.iterdir()] == ["gpt.safetensors"]


def test_one_checkpoint_can_be_named(saved: Path, tmp_path: Path) -> None:
    assert main(["--load", str(saved / "iter_0000001"), "--output", str(tmp_path)]) == 0
    tensors = load_file(tmp_path / "model.safetensors")
    expected = torch.load(saved / "expected_1.pt")
    assert torch.equal(tensors["head.weight"], expected["model.head.weight"])


def test_shards_and_index(saved: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    arguments = ["--load", str(saved), "--output", str(tmp_path), "--max-shard-size", "300"]
    assert main(arguments) == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    assert count > 2
    for name in files:
        tensors = load_file(tmp_path / name)
        assert sum(4 * tensor.numel() for tensor in tensors.values()) <= 300
        for key, tensor in tensors.items():
            assert index["weight_map"][key] == name and torch.equal(tensor, weights[key])


def test_a_tensor_larger_than_a_shard_gets_its_own(saved: Path, tmp_path: Path) -> None:
    arguments = ["--load", str(saved), "--output", str(tmp_path), "--max-shard-size", "1"]
    assert main(arguments) == 0
    assert len(load_file(next(tmp_path.glob("model-00001-of-*")))) == 1


# Bad input


def error_of(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    assert main(arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "Traceback" not in text
    return text


def test_a_size_that_is_none(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--load", str(saved), "--output", str(tmp_path / "out"), "--max-shard-size", "big"]
    assert "--max-shard-size big: expected a size" in error_of(flags, capsys)
    empty = str(tmp_path)
    text = error_of(["--load", empty, "--output", str(tmp_path / "out")], capsys)
    assert f"--load {empty}: there is no checkpoint" in text and not (tmp_path / "out").exists()


def test_damaged_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, optimizer = build(0, seed=1)
    path = save_in(tmp_path, model, optimizer, state_at(1))
    (path / "__0_0.distcp").unlink()
    arguments = ["--output", str(tmp_path / "out"), "--load"]
    assert "__0_0.distcp is missing" in error_of([*arguments, str(path)], capsys)
    assert "__0_0.distcp is missing" in error_of([*arguments, str(tmp_path)], capsys)


def test_number_beyond_fp16_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1e5)
    save_in(tmp_path, model, None, state_at(1))
    arguments = ["--load", str(tmp_path), "--output", str(tmp_path / "out"), "--dtype", "fp16"]
    text = error_of(arguments, capsys)
    assert "weight holds 100000, more than fp16 can: use --dtype bf16" in text
    assert list((tmp_path / "out").iterdir()) == []
