"""The campaign on two emulated nodes in its shortest form, and what it would find."""

import json
from pathlib import Path

import pytest

from benchmarks.endurance.endurance import require_equal
from benchmarks.endurance.resources import Sample, growth
from benchmarks.shared.interleaved import Disagreement
from tests.benchmarks.cluster.namespaces import needs_namespaces
from tests.benchmarks.started import run_benchmark


@needs_namespaces
def test_a_disturbed_job_goes_on_by_itself_with_the_same_losses(tmp_path: Path) -> None:
    kinds = ("truncate",)
    run_benchmark(
        "endurance.endurance",
        *("--minutes", "0", "--kinds", *kinds, "--save-interval", "3", "--pause", "0.2"),
        *("--limit", "60"),  # seconds: other tests may use all cores for a while
        *("--json", str(tmp_path / "result.json")),
    )
    result = json.loads((tmp_path / "result.json").read_text())
    rows = result["disturbances"]
    assert sorted(row["kind"] for row in rows) == sorted(kinds)
    for row in rows:
        assert 0 <= row["reached"] - row["resumed"] <= 3 * (1 + (row["kind"] == "truncate"))
    assert result["undisturbed"]["equal_losses"] > max(row["reached"] for row in rows)
    assert result["agents_started"] == [1, 1]  # ranks are restarted, not the agents


def test_another_last_digit_is_found() -> None:
    losses = {1: 2.5, 2: 2.25, 3: 2.0}
    require_equal({1: 2.5, 2: 2.25}, losses)
    with pytest.raises(Disagreement, match="1 of 3 losses differ; at iteration 2"):
        require_equal({**losses, 2: 2.2500000000000004}, losses)
    with pytest.raises(Disagreement, match="at iteration 2: None, undisturbed 2.25"):
        require_equal({1: 2.5, 3: 2.0}, losses)


def test_growth_leaves_out_the_warm_up() -> None:
    samples = [
        Sample(seconds=second, memory=100 + second, descriptors=9 if second < 2 else 12, threads=3)
        for second in range(8)
    ]
    assert growth(samples) == {"memory": 4, "descriptors": 0, "threads": 0}
