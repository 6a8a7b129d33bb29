"""The benchmark of generation on a tiny model: all tokens agree, and it prints its table."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.started import run_benchmark


def test_the_benchmark_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = "--layers 2 --hidden 192 --prompt 12 --tokens 6 --rows 1 3 --rounds 2"
    path = tmp_path / "result.json"
    done = run_benchmark("step.generate", *flags.split(), "--json", str(path))
    assert "tokens equal" in done.stdout and "transformers" in done.stdout
    sizes = json.loads(path.read_text())["sizes"]
    assert [size["rows"] for size in sizes] == [1, 3]
    for size in sizes:
        assert len(size["seconds"]) == 3
        assert all(len(times) == 2 and min(times) > 0 for times in size["seconds"].values())
