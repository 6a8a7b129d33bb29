"""The benchmark of Muon's step, with a tiny model."""

import json

import pytest

from tests.benchmarks.started import run_benchmark

SHAPE = "--layers 1 --hidden 32 --heads 2 --seq 16 --vocab 64 --micro-batch 1"


def test_it_verifies_times_and_counts_the_state(tmp_path):
    path = tmp_path / "result.json"
    flags = f"{SHAPE} --tokens 32 --rounds 1 --ranks 2 --json {path}"
    done = run_benchmark("step.muon_step", *flags.split())
    (comparison,) = json.loads(path.read_text())["comparisons"]
    adamw, *muons = comparison["loops"]
    assert adamw["ratio"] == 1 and adamw["operations"] == 0 and adamw["state_bytes"] == 8
    for row in muons:
        assert row["state_bytes"] == 4 and row["operations"] > 0 and row["ratio"] > 0
        assert 0 <= comparison["verified"][row["name"]] < 0.1
    assert "32 tokens per rank" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--ranks 3", "expected a multiple of 2"), ("--tokens 40", "expected multiples of --seq")],
)
def test_what_it_cannot_run_is_named(flags, message):
    assert message in run_benchmark("step.muon_step", *flags.split(), status=2).stderr
