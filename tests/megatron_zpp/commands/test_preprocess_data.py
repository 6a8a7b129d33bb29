"""tools/preprocess_data.py as a program: the files it writes, and its messages."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.indexed_dataset import IndexedDataset
from tests.full_disk import full_disk

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "preprocess_data.py"
BYTES = ("--tokenizer-type", "ByteLevelTokenizer")
EOD = 256


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=120
    )


def run_here(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the script in this process with one worker, which saves the start of a Python."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments), "--workers", "1"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    return ended.value.code


def fail(monkeypatch, capsys, *arguments: object) -> str:
    """Run the script, which must fail without a traceback; returns its last line, the error."""
    assert run_here(monkeypatch, *arguments) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    line = errors.strip().split("\n")[-1]
    assert line.startswith("error: ")
    return line


def lines_of(path: Path, *documents: object) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_index.tolist()
    return [
        [token for number in range(*pair) for token in dataset.get(number).tolist()]
        for pair in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def test_lines_become_documents_whatever_the_workers(tmp_path: Path) -> None:
    """Enough lines for many chunks; the order must be that of the file."""
    texts = [f"{number} " + "é" * (number % 977) for number in range(3000)]
    texts[7] = ""
    source = lines_of(
        tmp_path / "a.jsonl", *({"text": t, "id": f"n{n}"} for n, t in enumerate(texts))
    )
    files = {}
    for workers in (1, 3):
        prefix = tmp_path / f"by{workers}"
        process = run(
            "--input", source, "--output-prefix", prefix, "--json-keys", "text", "id",
            *BYTES, "--append-eod", "--workers", workers, "--log-interval", 1000,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        assert "3000 documents" in process.stdout and f"{prefix}_id_document.bin" in process.stdout
        assert process.stderr.count(" documents/s, ") == 3
        files[workers] = [
            Path(f"{prefix}_{key}_document.{end}").read_bytes()
            for key in ("text", "id")
            for end in ("bin", "idx")
        ]
    assert files[1] == files[3]
    expected = [[*text.encode(), EOD] if text else [] for text in texts]
    assert documents_of(tmp_path / "by3_text_document") == expected
    dataset = IndexedDataset(tmp_path / "by3_text_document")
    assert dataset.dtype == np.uint16
    assert len(dataset) == 2999  # an empty document has no sequence
    assert len(list(tmp_path.iterdir())) == 9


def test_blank_lines_are_skipped_and_counted(tmp_path: Path, monkeypatch, capsys) -> None:
    source = tmp_path / "a.json"
    source.write_text('{"text": "a"}\r\n\n  \n{"text": "b"}')
    prefix = tmp_path / "x"
    assert run_here(monkeypatch, "--input", source, "--output-prefix", prefix, *BYTES) == 0
    assert "2 blank lines skipped" in capsys.readouterr().out
    assert documents_of(tmp_path / "x_text_document") == [[97], [98]]


def test_other_mistakes(tmp_path: Path, monkeypatch, capsys) -> None:
    source = lines_of(tmp_path / "a.jsonl", {"text": "1 x"})
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "empty.jsonl").touch()
    lines_of(tmp_path / "blank.jsonl", {"text": ""})
    (tmp_path / "none").mkdir()
    output = ("--output-prefix", tmp_path / "none" / "x")
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 10)
    for arguments, message in (
        (("--input", tmp_path / "a.csv", *output, *BYTES), "a.csv: it is not one of .jsonl"),
        (("--input", tmp_path / "none", *output, *BYTES), "none: no file in it is one of .jsonl"),
        (("--input", tmp_path / "a.txt", *output, *BYTES), "a.txt: not UTF-8 (invalid start byte"),
        (("--input", tmp_path / "empty.jsonl", *output, *BYTES), "there is no text in it"),
        (("--input", tmp_path / "blank.jsonl", *output, *BYTES), "there is no text in it"),
        (("--input", source, *output), "give --tokenizer-type"),
        (("--input", source, *output, *null), "a.jsonl, line 1: NullTokenizer reads whole"),
        (("--input", source, "--output-prefix", source / "x", *BYTES), "(Not a directory): "),
        (
            ("--input", tmp_path / "a.txt", *output, *BYTES, "--json-keys", "a", "b"),
            "one text only",
        ),
    ):
        assert message in fail(monkeypatch, capsys, *arguments)
    assert list((tmp_path / "none").iterdir()) == []


def test_a_mistake_in_a_worker_keeps_what_was_there(tmp_path: Path) -> None:
    """Two chunks of good lines come first; an older dataset of the same name stays as it was."""
    source = tmp_path / "a.jsonl"
    source.write_bytes((b'{"text": "' + b"a" * 500 + b'"}\n') * 1200 + b"nonsense\n")
    older = tmp_path / "x_text_document.bin"
    older.write_bytes(b"older")
    failed = run("--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--workers", 2)
    assert failed.returncode == 1
    last = failed.stderr.strip().split("\n")[-1]
    assert last.startswith(f"error: {source}, line 1201: not JSON")
    assert "Traceback" not in failed.stderr
    assert older.read_bytes() == b"older"
    assert sorted(tmp_path.iterdir()) == [source, older]


def stopped_run(source: Path, prefix: Path, number: signal.Signals) -> subprocess.Popen[str]:
    """A run of two workers that was sent a signal after its first line of progress."""
    process = subprocess.Popen(
        command(
            "--input", source, "--output-prefix", prefix, *BYTES, "--append-eod",
            "--workers", 2, "--log-interval", 200,
        ),
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert " documents/s" in process.stderr.readline()
    process.send_signal(number)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_resumes_after_a_signal(tmp_path, monkeypatch, capsys, number):
    """The signal comes with most of 40 MB still to be read; the last part is done by one worker."""
    source = tmp_path / "a.jsonl"
    texts = [f"{n} " + "a" * 1000 for n in range(40_000)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    process = stopped_run(source, tmp_path / "x", number)
    last_line = process.communicate(timeout=60)[1].strip().split("\n")[-1]
    assert process.returncode == 130
    assert (
        last_line.startswith("error: stopped; ")
        and "the same command goes on from there" in last_line
    )
    partial = tmp_path / "x.partial"
    assert sorted(tmp_path.iterdir()) == [source, partial]
    assert (partial / "0.bin").stat().st_size < 1000 * 2 * 40_000
    with open(partial / "0.bin", "ab") as file:
        file.write(b"what a kill may leave behind")
    again = ("--input", source, "--output-prefix", tmp_path / "x", *BYTES)
    other = fail(monkeypatch, capsys, *again)
    assert f"{partial} holds an unfinished run that was begun with another --append-eod" in other
    assert run_here(monkeypatch, *again, "--append-eod") == 0
    assert "going on after " in capsys.readouterr().out
    assert not partial.exists()
    dataset = IndexedDataset(tmp_path / "x_text_document")
    assert dataset.document_index.tolist() == list(range(40_001))
    expected = np.frombuffer("".join(f"{text}\0" for text in texts).encode(), np.uint8)
    assert np.array_equal(np.where(dataset._tokens == EOD, 0, dataset._tokens), expected)


def test_killed_it_leaves_no_worker_and_no_dataset(tmp_path, monkeypatch):
    source = tmp_path / "a.jsonl"
    source.write_bytes((b'{"text": "' + b"a" * 1000 + b'"}\n') * 20_000)
    process = stopped_run(source, tmp_path / "x", signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    # The workers hold the other end of this pipe: it ends when all of them have.
    process.communicate(timeout=60)
    assert sorted(tmp_path.iterdir()) == [source, tmp_path / "x.partial"]
    again = ("--input", source, "--output-prefix", tmp_path / "x", *BYTES, "--append-eod")
    assert run_here(monkeypatch, *again) == 0
    assert documents_of(tmp_path / "x_text_document") == [[97] * 1000 + [EOD]] * 20_000


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    source = lines_of(tmp_path / "a.jsonl", *({"text": "a" * 1000} for _ in range(4000)))
    with full_disk(2_000_000):
        message = fail(
            monkeypatch, capsys, "--input", source, "--output-prefix", tmp_path / "x", *BYTES
        )
    expected = (
        f"error: cannot write in {tmp_path / 'x.partial'} (File too large): make room or give"
    )
    assert message.startswith(expected)
    assert list(tmp_path.iterdir()) == [source]


def test_flags_without_effect_say_so(tmp_path: Path, monkeypatch, caplog) -> None:
    source = lines_of(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"})
    flags = ("--input", source, "--output-prefix", tmp_path / "x", *BYTES)
    idle = ("--partitions", 2, "--keep-sequential-samples")
    assert run_here(monkeypatch, *flags, *idle) == 0
    said = "no effect here: --partitions 2, --keep-sequential-samples (text"
    assert said in caplog.text
    assert documents_of(tmp_path / "x_text_document") == [[97], [98]]
