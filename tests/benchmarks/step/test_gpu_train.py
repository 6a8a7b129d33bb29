"""The benchmark of a training step on one device, with a tiny model on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.shared.setting import SHAPE, Setting
from benchmarks.shared.stopwatch import quartiles
from benchmarks.step.contest import Disagreement
from benchmarks.step.contestants import unsharded
from benchmarks.step.duel import agreement
from benchmarks.step.fill import show_size, speeds

from benchmarks.step.gpu_train import SIZES, meet_all, new
from benchmarks.step.hugging_face_peer import ungrouped

ROOT = Path(__file__).resolve().parents[3]
# What a machine may lack: the step of training must not need it.
LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("orjson", "fastokens", "pyarrow") or name == "backports.zstd":
            raise ImportError(name)
sys.meta_path.insert(0, Lacking())
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict, str]:
    folder = tmp_path_factory.mktemp("train")
    (folder / "sitecustomize.py").write_text(LACKING)
    command = [
        sys.executable, "benchmarks/step/gpu_train.py", "--device", "cpu", "--sizes", "tiny",
        "--peers", "eager", "hf", "--no-compile", "--num-workers", "0", "--rounds", "2",
        "--steps", "2", "--micro-batch", "3", "--json", str(folder / "made.json"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "made.json").read_text()), done.stdout


def test_every_loop_is_verified_and_timed(finished) -> None:
    (found,) = finished[0]["sizes"]
    names = [peer["name"] for peer in found["peers"]]
    assert names[0] == "bare loop, not compiled"
    assert names[1:] == ["Hugging Face, not compiled"] or "transformers" in found["not_run"][0]
    assert found["failed"] == []
    for peer in found["peers"]:
        assert set(peer["verified"]) == {"loss", "gradient norm"}
        assert 0 <= peer["verified"]["loss"] <= 2**-9
        assert len(peer["seconds"]) == len(peer["our_seconds"]) == 2
        low, high = peer["quartiles"]
        assert low <= peer["ratio"] <= high
    assert len(found["ours"]["seconds"]) == 2 * len(names)


def test_what_was_not_measured_is_not_said(finished) -> None:
    (found,) = finished[0]["sizes"]
    assert found["ours"]["peak_bytes"] is None  # nobody counts the CPU's
    header, row = (
        next(line for line in finished[1].splitlines() if word in line)
        for word in ("peak GB", "  ours ")
    )
    assert row.rstrip().endswith("%") and "peak GB" in header


def test_numbers_follow_from_the_step_times(finished) -> None:
    (found,) = finished[0]["sizes"]
    shape = found["shape"]
    assert shape == dict(zip(SHAPE, SIZES["tiny"], strict=True)) | {"micro-batch": 3}
    assert found["tokens_per_step"] == 3 * shape["micro-batches"] * shape["seq"]
    # 3 passes of 2 operations for each weight of a product, and 4 L S H for the attention
    hidden, layers, padded = shape["hidden"], shape["layers"], 512
    products = 12 * layers * hidden**2 + hidden * padded
    attention = 4 * layers * shape["seq"] * hidden
    assert found["flops_per_token"] == 3 * (2 * products + attention)
    for one in (found["ours"], *found["peers"]):
        assert one["tokens_per_s"] == pytest.approx(found["tokens_per_step"] / one["median"])
        flops = one["tokens_per_s"] * found["flops_per_token"]
        assert one["flops_per_s"] == pytest.approx(flops)
        assert one["mfu"] == pytest.approx(flops / found["product_rate"])


def test_a_table_is_printed(finished) -> None:
    for words in ("MFU", "tokens/s", "bf16 products", "verified, loss within", "ours not compiled"):
        assert words in finished[1]


def test_loops_that_train_differently_are_not_timed() -> None:
    setting = SimpleNamespace(dtype="bf16")
    right = [(6.0, 1.0), (5.9, 0.9)]
    assert agreement("peer", right, right, setting) == {"loss": 0, "gradient norm": 0}
    with pytest.raises(Disagreement, match="peer and ours do not train alike: loss differs"):
        agreement("peer", [(6.0, 1.0), (5.88, 0.9)], right, setting)
    with pytest.raises(Disagreement, match="gradient norm differs"):
        agreement("peer", [(6.0, 1.01), (5.9, 0.9)], right, setting)
    with pytest.raises(Disagreement, match="loss differs by nan"):
        agreement("peer", [(float("nan"), 1.0), (5.9, 0.9)], right, setting)


class FakeDuels:
    """Meets each peer as it is told: with a row, or with an error."""

    def __init__(self, *results: dict | RuntimeError) -> None:
        self.results, self.is_closed = list(results), False
        self.measured = SimpleNamespace(name="ours", seconds=[], peak=0)

    def meet(self, how) -> dict:
        result = self.results.pop(0)
        if isinstance(result, RuntimeError):
            raise result
        self.measured.seconds += [1.0]
        return {"name": how.name, "seconds": [2.0]} | result

    def alone(self) -> None:
        self.measured.seconds += [3.0]

    def close(self) -> None:
        self.is_closed = True


def sized() -> dict:
    found = new("tiny", SimpleNamespace(micro_batch=None, micro_batches=None, no_compile=False))
    return found | {
        "flops_per_token": 10.0, "tokens_per_step": 5, "product_rate": 100.0,
        "parameters": 7,
    }  # fmt: skip


def test_a_peer_that_fails_does_not_stop_the_others(capsys) -> None:
    row = {"ratio": 2.0, "quartiles": [2.0, 2.0], "peak_bytes": 3 << 30, "verified": {"loss": 0.0}}
    duels, found, saved = FakeDuels(torch.OutOfMemoryError("no\nmore"), row), sized(), []
    meet_all(found, duels, ["blocks", "whole"], float("inf"), lambda: saved.append(1))
    assert found["failed"] == ["bare loop, compiled blocks: OutOfMemoryError: no"]
    assert [peer["name"] for peer in found["peers"]] == ["bare loop, compiled whole"]
    assert found["ours"]["seconds"] == [1.0] and duels.is_closed and len(saved) == 2
    capsys.readouterr()
    show_size(found)
    printed = capsys.readouterr().out
    assert "failed: bare loop, compiled blocks" in printed and "3.22" in printed


def test_without_time_ours_runs_alone_and_the_rest_is_named() -> None:
    duels, found = FakeDuels(), sized()
    meet_all(found, duels, ["blocks", "eager"], 0.0, lambda: None)
    assert found["ours"]["seconds"] == [3.0] and found["peers"] == []
    assert [why.rpartition(": ")[2] for why in found["not_run"]] == ["the time was up"] * 2


def test_speeds() -> None:
    assert speeds([4.0, 1.0, 2.0], sized()) == {
        "median": 2.0, "tokens_per_s": 2.5, "flops_per_s": 25.0, "mfu": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(("size", "parameters"), [("124M", 124), ("350M", 355), ("1.3B", 1316)])
def test_sizes_are_what_they_are_called(size: str, parameters: int) -> None:
    shape = tuple(zip(SHAPE, SIZES[size], strict=True))
    setting = Setting(shape=shape, ranks=SimpleNamespace(num_ranks=1), dtype="bf16", stage=0)
    assert round(unsharded(setting).num_parameters() / 1e6) == parameters


def test_quartiles_of_few_values_are_their_ends() -> None:
    assert quartiles([3.0, 1.0, 2.0]) == [1.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0]) == [1.25, 3.75]


def test_heads_are_taken_apart_into_queries_keys_and_values() -> None:
    rows = torch.tensor([[head, part, channel] for head in range(2) for part in range(3)
                         for channel in range(4)])  # fmt: skip
    found = ungrouped(rows, heads=2).tolist()
    assert found == [[head, part, channel] for part in range(3) for head in range(2)
                     for channel in range(4)]  # fmt: skip
