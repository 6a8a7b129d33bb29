"""The benchmark of MixZ++ on a small model: what crosses nodes, and what it refuses."""

import json

import pytest

from tests.benchmarks.cluster.namespaces import needs_namespaces
from tests.benchmarks.started import run_benchmark


@needs_namespaces
def test_frozen_weights_cross_once_with_hpz(tmp_path):
    path = tmp_path / "result.json"
    shape = "--layers 2 --hidden 256 --heads 4 --seq 16 --vocab 64"
    run_benchmark("cluster.mixz", *f"{shape} --steps 3 --tokens 3 --json {path}".split())
    exact, stored, hpz = json.loads(path.read_text())["rows"]
    frozen = 2 * 2 * 12 * 256**2  # bf16 bytes of two blocks' matrices
    # Each node sends half of what there is to each gather, forward and backward: M in bf16.
    assert exact["later_step"] > frozen and stored["later_step"] < 0.6 * exact["later_step"]
    assert hpz["later_step"] < hpz["first_step"] - 0.2 * frozen
    assert hpz["later_token"] < 0.01 * stored["later_token"]
    assert stored["held_bytes"] < 0.52 * exact["held_bytes"]


@pytest.mark.parametrize("flag", ["--steps", "--tokens"])
def test_one_step_or_token_is_too_few(flag):
    done = run_benchmark("cluster.mixz", flag, "1", status=1)
    assert done.stderr.startswith(f"error: {flag} 1: expected at least 2")
