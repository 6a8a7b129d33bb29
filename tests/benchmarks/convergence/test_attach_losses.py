"""The table of losses under other trainers, for one of them."""

import json

import pytest

from tests.benchmarks.started import run_benchmark


def test_plain_fsdp2_sends_more_and_learns_alike():
    done = run_benchmark(
        "convergence.attach_losses", *"--trainers FSDP2 --steps 2 --json -".split()
    )
    (row,) = json.loads(done.stdout)["rows"]
    assert row["attached"] == pytest.approx(row["loss"], rel=5e-3)  # what INT8 may move a loss by
    assert 5 * row["sent"] < row["plain"] and 12 * row["forecast_of_4"] < row["plain_of_4"]
