"""Commands that only handle text do not import packages that take seconds to import."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.new_interpreter

FILES = Path(__file__).resolve().parents[2] / "data" / "gpt2_part"
SLOW = {"torch", "transformers", "pandas", "matplotlib"}
BPE = ("--vocab-file", FILES / "vocab.json", "--merge-file", FILES / "merges.txt")
RUN = """
import sys
from megatron_zpp.commands.__main__ import main
status = main(sys.argv[1:])
print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
sys.exit(status)
"""


def imported(command: str, arguments: Sequence[object]) -> set[str]:
    """The packages that a run of the command has imported."""
    words = [sys.executable, "-c", RUN, command, *map(str, arguments)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    return set(process.stderr.strip().split("\n")[-1].split())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset written by `preprocess`, which must not import a slow package either."""
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "a line"}) + "\n")
    arguments = ("--input", source, "--output-prefix", tmp_path / "x", *BPE, "--workers", 2)
    assert not imported("preprocess", arguments) & SLOW
    return tmp_path / "x_text_document"


@pytest.mark.new_interpreter
def test_merging_and_inspecting_a_dataset(dataset: Path, tmp_path: Path) -> None:
    arguments = ("--input", dataset, dataset, "--output-prefix", tmp_path / "both")
    assert not imported("merge", arguments) & SLOW
    arguments = ("--input", tmp_path / "both", "--histogram", tmp_path / "lengths.png", *BPE)
    assert not imported("inspect", arguments) & SLOW
