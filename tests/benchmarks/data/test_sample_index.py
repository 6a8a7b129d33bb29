"""The benchmark of the sample index on a thousand documents: it verifies, and prints its table."""

import json
from pathlib import Path

import pytest

from megatron_zpp.data.native_index import native_index
from tests.benchmarks.started import run_benchmark


@pytest.mark.skipif(native_index() is None, reason="csrc/ is not built here")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    flags = f"--documents 1000 --epochs 3 --rounds 2 --json {path}"
    done = run_benchmark("data.sample_index", *flags.split())
    assert "arrays equal" in done.stdout
    result = json.loads(path.read_text())
    assert list(result["parts"]) == ["document", "sample", "shuffle", "blend"]
    assert all(len(times) == 2 for part in result["parts"].values() for times in part.values())
