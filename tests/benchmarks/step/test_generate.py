"""The benchmark of generation on a tiny model: all contestants agree, and its table is whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = "--layers 2 --hidden 192 --prompt 12 --tokens 6 --rows 1 3 --rounds 2"
    made = tmp_path / "made.json"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks/step/generate.py"), *flags.split(),
            "--json", str(made),
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tokens equal" in done.stdout and "transformers" in done.stdout
    sizes = json.loads(made.read_text())["sizes"]
    assert [size["rows"] for size in sizes] == [1, 3]
    for size in sizes:
        assert len(size["seconds"]) == 3
        assert all(len(times) == 2 and min(times) > 0 for times in size["seconds"].values())
