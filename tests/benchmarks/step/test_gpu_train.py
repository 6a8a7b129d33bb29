"""The benchmark of a training step on one device, with a tiny model on the CPU."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.shared.benchmark import SHAPE
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step.gpu_train import SIZES, compare_all, new_size, show_size, speeds
from benchmarks.step.training_loops import DEVICE_LOOPS, unsharded
from tests.launched import ROOT

# Packages that a machine may lack and that a training step must not need.
WITHOUT_OPTIONAL_PACKAGES = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("orjson", "fastokens", "pyarrow"):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[dict, str]:
    folder = tmp_path_factory.mktemp("train")
    (folder / "sitecustomize.py").write_text(WITHOUT_OPTIONAL_PACKAGES)
    command = [
        sys.executable, "-m", "benchmarks.step.gpu_train", "--device", "cpu", "--sizes", "tiny",
        "--peers", "eager", "hf", "--no-compile", "--num-workers", "0", "--rounds", "2",
        "--steps", "2", "--micro-batch", "3", "--json", str(folder / "result.json"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text()), done.stdout


def test_every_loop_is_verified_and_timed(finished) -> None:
    (size,) = finished[0]["sizes"]
    names = [peer["name"] for peer in size["peers"]]
    assert names[0] == "bare loop, not compiled"
    assert names[1:] == ["Hugging Face, not compiled"] or "transformers" in size["not_run"][0]
    assert size["failed"] == []
    for peer in size["peers"]:
        assert set(peer["verified"]) == {"loss", "gradient norm"}
        assert 0 <= peer["verified"]["loss"] <= 2**-9
        assert len(peer["seconds"]) == len(peer["our_seconds"]) == 2
        low, high = peer["quartiles"]
        assert low <= peer["ratio"] <= high
    assert len(size["ours"]["seconds"]) == 2 * len(names)
    assert size["ours"]["peak_bytes"] is None  # not counted on a CPU
    for words in ("MFU", "tokens/s", "bf16 products", "verified, loss within", "ours not compiled"):
        assert words in finished[1]


def test_numbers_follow_from_the_step_times(finished) -> None:
    (size,) = finished[0]["sizes"]
    shape = size["shape"]
    assert shape == dict(zip(SHAPE, SIZES["tiny"], strict=True)) | {"micro-batch": 3}
    assert size["tokens_per_step"] == 3 * shape["micro-batches"] * shape["seq"]
    # 3 passes of 2 operations for each weight of a product, and 4 L S H for the attention
    hidden, layers, padded = shape["hidden"], shape["layers"], 512
    products = 12 * layers * hidden**2 + hidden * padded
    attention = 4 * layers * shape["seq"] * hidden
    assert size["flops_per_token"] == 3 * (2 * products + attention)
    for loop in (size["ours"], *size["peers"]):
        assert loop["tokens_per_s"] == pytest.approx(size["tokens_per_step"] / loop["median"])
        flops = loop["tokens_per_s"] * size["flops_per_token"]
        assert loop["flops_per_s"] == pytest.approx(flops)
        assert loop["mfu"] == pytest.approx(flops / size["product_rate"])


class FakeComparison:
    """Returns the given rows or raises the given errors, one for each peer."""

    def __init__(self, *results: dict | RuntimeError) -> None:
        self.results, closed = list(results), SimpleNamespace(close=lambda: None)
        self.ours = SimpleNamespace(name="ours", seconds=[], peak_bytes=0, loop=closed)

    def compare(self, kind: str) -> dict:
        result = self.results.pop(0)
        if isinstance(result, RuntimeError):
            raise result
        self.ours.seconds += [1.0]
        return {"name": DEVICE_LOOPS[kind], "seconds": [2.0]} | result

    def time_alone(self) -> None:
        self.ours.seconds += [3.0]


def tiny_size() -> dict:
    options = SimpleNamespace(micro_batch=None, micro_batches=None, no_compile=False)
    numbers = {"flops_per_token": 10.0, "tokens_per_step": 5, "product_rate": 100.0}
    return new_size(options, "tiny") | numbers | {"parameters": 7}


def test_a_peer_that_fails_does_not_stop_the_others() -> None:
    row = {"ratio": 2.0, "quartiles": [2.0, 2.0], "peak_bytes": 3 << 30, "verified": {"loss": 0.0}}
    comparison, size = FakeComparison(torch.OutOfMemoryError("no\nmore"), row), tiny_size()
    peers = SimpleNamespace(peers=["blocks", "eager"])
    compare_all(size, comparison, peers, float("inf"))
    assert size["failed"] == ["bare loop, compiled blocks: OutOfMemoryError: no"]
    assert [peer["name"] for peer in size["peers"]] == ["bare loop, not compiled"]
    assert size["ours"]["seconds"] == [1.0]
    printed = show_size(size)
    assert "failed: bare loop, compiled blocks" in printed and "3.22" in printed
    comparison, size = FakeComparison(), tiny_size()
    compare_all(size, comparison, peers, 0.0)  # ours runs alone and the rest is named
    assert size["ours"]["seconds"] == [3.0] and size["peers"] == []
    assert [why.rpartition(": ")[2] for why in size["not_run"]] == ["the time was up"] * 2


def test_speeds() -> None:
    assert speeds([4.0, 1.0, 2.0], tiny_size()) == {
        "median": 2.0, "tokens_per_s": 2.5, "flops_per_s": 25.0, "mfu": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(("size", "parameters"), [("124M", 124), ("350M", 355), ("1.3B", 1316)])
def test_sizes_are_what_they_are_called(size: str, parameters: int) -> None:
    shape = dict(zip(SHAPE, SIZES[size], strict=True))
    setup = TrainingSetup(shape=shape, ranks=SimpleNamespace(num_ranks=1), dtype="bf16", stage=0)
    assert round(unsharded(setup).num_parameters() / 1e6) == parameters
