"""ZeRO++ beside nothing quantized, for one of the sizes."""

import json

import pytest

from tests.benchmarks.started import run_benchmark


def test_gradients_are_close_with_a_pipeline():
    done = run_benchmark("convergence.parallel_zeropp", *"--sizes pp2 --steps 2 --json -".split())
    (row,) = json.loads(done.stdout)["rows"]
    assert row["gain"] == pytest.approx(1, abs=0.005)
    assert row["zeropp loss"] == pytest.approx(row["loss"], rel=0.005)
    assert row["sent"] == row["expected"] > 0
