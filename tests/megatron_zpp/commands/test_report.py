"""`megatron-zpp report` draws a run's report again."""

from pathlib import Path

import pytest

from megatron_zpp.commands.__main__ import main
from tests.megatron_zpp.monitor.report.recorded import usual


def test_the_folder_above_the_curves_will_do(tmp_path: Path, capsys) -> None:
    usual(tmp_path / "run" / "tensorboard")
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "tensorboard" / "report.html"
    assert capsys.readouterr().out == f"{page}\n"
    assert "<title>run</title>" in page.read_text()
    words = ["report", "--input", str(page.parent), "--output", str(tmp_path / "other.html")]
    assert main(words) == 0
    assert (tmp_path / "other.html").read_text().count("<svg") == page.read_text().count("<svg")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{}"], "{} has several runs: name one of {}/a, {}/b"),
        (["{}/a", "--output", "{}"], "--output {}: is a folder; name a file"),
        (["{}/empty"], "{}/empty has no metrics.jsonl with log lines"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, words: list, message: str, capsys) -> None:
    for name in "ab":
        usual(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 1
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err
