"""The benchmark of saves on a tiny model: it verifies, and prints its table."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.shared.interleaved import Disagreement
from benchmarks.step.save_stall import ASYNCHRONOUS, SYNCHRONOUS, Saves, verify
from benchmarks.step.training_loops import TrainingLoop
from tests.benchmarks.started import run_benchmark
from zeropp.checkpoint.async_save import AsyncWriter


def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = "--layers 1 --hidden 32 --heads 2 --seq 8 --vocab 64 --rounds 2"
    done = run_benchmark(
        "step.save_stall", *flags.split(), "--folder", str(tmp_path), "--json", str(path)
    )
    assert "equal byte by byte; 2 rounds" in done.stdout
    result = json.loads(path.read_text())
    assert {way: len(times) for way, times in result["stall"].items()} == {
        SYNCHRONOUS: 2, ASYNCHRONOUS: 2,
    }  # fmt: skip
    assert result["bytes"] > 12 * result["parameters"]
    assert all(
        complete > stall
        for complete, stall in zip(result["complete"], result["stall"][ASYNCHRONOUS], strict=True)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


class DifferentSaves(Saves):
    """Writes another byte in one of the two checkpoints."""

    def differences(self) -> list[str]:
        with open(self.folders[SYNCHRONOUS] / "iter_0000001" / "__0_0.distcp", "r+b") as file:
            file.write(b"x")
        return super().differences()


def test_different_checkpoints_are_not_timed(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    loop = TrainingLoop(
        name="", model=model, optimizer=torch.optim.AdamW(model.parameters()), step=lambda: None
    )
    with AsyncWriter() as writer:
        assert verify(Saves(loop, tmp_path, writer)) > 0
        with pytest.raises(Disagreement, match=r"differ in \['__0_0.distcp'\]"):
            verify(DifferentSaves(loop, tmp_path, writer))
