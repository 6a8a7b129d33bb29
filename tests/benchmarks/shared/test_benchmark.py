"""The frame of benchmarks: its command line, what it refuses, its statuses, and its files."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.shared.benchmark import SHAPE, Benchmark, Flag
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.rank_processes import RankFailed, run_on_ranks

SPEC = SimpleNamespace(name="benchmarks.folder.how_fast")


def run(monkeypatch, words: str, *, problem: Exception | None = None, **more) -> tuple[int, dict]:
    """The exit status of a benchmark with the given command line, and its result."""
    results = []

    def measure(options, result: dict) -> None:
        if problem is not None:
            raise problem
        results.append(result)
        result["rounds"] = options.rounds
        result["names"] = list(options.names)

    benchmark = Benchmark(
        spec=SPEC,
        question="How fast?",
        flags=(Flag("--rounds", 3, "of each", least=1), Flag("--names", ("a", "b"))),
        measure=measure,
        show=lambda result: f"{result['rounds']} rounds of {result['names']}",
        **more,
    )
    monkeypatch.setattr(sys, "argv", ["how_fast.py", *words.split()])
    return benchmark.main(), *results


def test_a_result_says_what_ran_and_is_printed_and_written(monkeypatch, tmp_path: Path, capsys):
    words = f"--rounds 2 --json {tmp_path}/new/a.json --results {tmp_path}/page.md"
    status, result = run(monkeypatch, words, shape={"layers": 7})
    assert status == 0 and "2 rounds of ['a', 'b']" in capsys.readouterr().out
    assert json.loads((tmp_path / "new/a.json").read_text()) == result
    assert result["command"].startswith("python -m benchmarks.folder.how_fast --rounds 2")
    assert {"date", "commit", "machine", "versions", "load"} <= set(result)
    assert set(result["shape"]) == set(SHAPE) and result["shape"]["layers"] == 7
    page = (tmp_path / "page.md").read_text()
    assert page.startswith(f"# How fast, {result['date'][:10]}\n\n`{result['command']}`\n")
    assert "torch " in page and page.endswith("2 rounds of ['a', 'b']\n")


def test_a_dash_prints_nothing_but_the_json_and_a_folder_must_be_possible(
    monkeypatch, tmp_path: Path, capsys
):
    _, result = run(monkeypatch, "--json - --names c")
    assert json.loads(capsys.readouterr().out) == result and result["names"] == ["c"]
    (tmp_path / "file").write_text("")
    words = f"--json {tmp_path}/file/a.json"
    assert run(monkeypatch, words, problem=AssertionError("measured")) == (2,)
    assert f"cannot write a result into {tmp_path}/file: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem", "status", "message"),
    [
        ("--rounds 0", None, 2, "error: --rounds 0: expected at least 1"),
        ("", Disagreement("a and b differ"), 1, "error: a and b differ"),
        ("", RankFailed("the ranks exited"), 1, "error: the ranks exited"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(monkeypatch, capsys, words, problem, status, message):
    assert run(monkeypatch, words, problem=problem)[0] == status
    printed = capsys.readouterr()
    assert printed.err == f"{message}\n" and not printed.out


def test_a_benchmark_that_may_not_be_trusted_fails_after_it_has_said_what_it_saw(
    monkeypatch, capsys
):
    status, _ = run(monkeypatch, "", succeeded=lambda result: result["rounds"] > 3)
    assert status == 1 and "3 rounds" in capsys.readouterr().out


def test_rank_0_answers_and_what_it_raises_is_raised(capfd):
    module = "tests.benchmarks.shared.called_rank"
    assert run_on_ranks(module, 2, 7) == [7, 2]
    with pytest.raises(Disagreement, match="a and b differ"):
        run_on_ranks(module, 2, 7, variables={"DISAGREES": "1"})
    assert not capfd.readouterr().err
