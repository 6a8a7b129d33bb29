"""The tools for text start at once: what takes seconds to import is not imported."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = {"torch", "transformers", "pandas", "matplotlib"}
PART = ROOT / "tests" / "data" / "gpt2_part"
BPE = ("--vocab-file", PART / "vocab.json", "--merge-file", PART / "merges.txt")
RUN = """
import runpy, sys
root, *sys.argv = sys.argv[1:]
sys.path.insert(0, root)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


def imported(tool: str, arguments: Sequence[object]) -> set[str]:
    """The packages that a run of the tool has imported."""
    command = [sys.executable, "-c", RUN, ROOT, ROOT / "tools" / tool, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.strip().split("\n")[-1].split())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Made without what is slow, too."""
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "a line"}) + "\n")
    arguments = ("--input", source, "--output-prefix", tmp_path / "x", *BPE)
    assert not imported("preprocess_data.py", (*arguments, "--workers", 2)) & SLOW
    return tmp_path / "x_text_document"


def test_merging_and_inspecting_a_dataset(dataset: Path, tmp_path: Path) -> None:
    merged = ("--input", dataset, dataset, "--output-prefix", tmp_path / "both")
    assert not imported("merge_datasets.py", merged) & SLOW
    drawn = ("--input", tmp_path / "both", "--histogram", tmp_path / "lengths.png", *BPE)
    assert not imported("inspect_dataset.py", drawn) & SLOW
