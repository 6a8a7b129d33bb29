"""The benchmark of preprocessing on a few kilobytes: it times and prints what it says."""

import json
from pathlib import Path

from tests.benchmarks.started import run_benchmark
from tests.launched import ROOT

PART = ROOT / "tests" / "data" / "gpt2_part"


def test_the_benchmark_runs(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one text")
    (text / "b.md").write_text("another text")
    (text / "c.md").write_text("one text")
    path = tmp_path / "result.json"
    flags = f"--rounds 1 --input {text} --libraries tiktoken --json {path}"
    files = ("--vocab-file", str(PART / "vocab.json"), "--merge-file", str(PART / "merges.txt"))
    done = run_benchmark("data.preprocess", *flags.split(), *files)
    assert "two workers against one: " in done.stdout and "datasets equal" in done.stdout
    result = json.loads(path.read_text())
    assert (result["documents"], result["text_bytes"]) == (2, len("one textanother text"))
    runs = result["rounds"][0]["tiktoken"]
    assert runs["workers 1"]["cpu"] > 0 and runs["workers 2"]["memory"] > 10**7
