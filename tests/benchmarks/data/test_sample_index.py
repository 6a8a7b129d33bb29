"""The benchmark of the sample index on a thousand documents: verified, and its table is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_zpp.data.native_index import native_index

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(native_index() is None, reason="csrc/ is not built here")
def test_the_benchmark_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "sample_index.py"), "--documents", "1000",
            "--epochs", "3", "--rounds", "2", "--json", str(tmp_path / "made.json"),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "arrays equal" in done.stdout
    result = json.loads((tmp_path / "made.json").read_text())
    assert list(result["parts"]) == ["document", "sample", "shuffle", "blend"]
    assert all(len(times) == 2 for part in result["parts"].values() for times in part.values())
    arrays = 4 * (3 * 1000 + 2 * (result["samples"] + 1) + result["samples"])
    assert result["memory"]["arrays"] == arrays
    assert result["memory"]["peak"] >= result["memory"]["before"] > 10**7
