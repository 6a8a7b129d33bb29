"""The benchmark of preprocessing on a few kilobytes: its table has what it promises."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PART = ROOT / "tests" / "data" / "gpt2_part"


def test_the_benchmark_runs(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one text")
    (text / "b.md").write_text("another text")
    (text / "c.md").write_text("one text")
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "benchmarks" / "preprocess.py"), "--rounds", "1",
            "--vocab-file", str(PART / "vocab.json"), "--merge-file", str(PART / "merges.txt"),
            "--input", str(text), "--libraries", "tiktoken", "--json", str(tmp_path / "made.json"),
        ],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "two workers against one: " in done.stdout and "datasets equal" in done.stdout
    result = json.loads((tmp_path / "made.json").read_text())
    assert (result["documents"], result["text_bytes"]) == (2, len("one text" "another text"))
    runs = result["rounds"][0]["tiktoken"]
    assert runs["workers 1"]["cpu"] > 0 and runs["workers 2"]["memory"] > 10**7
