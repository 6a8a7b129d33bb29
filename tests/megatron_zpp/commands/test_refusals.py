"""Mistakes in the flags of commands: each ends with one line that says what to do."""

import pytest

from megatron_zpp.commands.__main__ import main
from tests.launched import ROOT
from tests.megatron_zpp.settings.tables import rows

BESIDE = {
    "plan": "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --hidden-dropout 0 --attention-dropout 0 "
}


@pytest.mark.parametrize(
    "row", rows("refused_commands.tsv"), ids=lambda row: f"{row['command']} {row['arguments']}"
)
def test_mistakes_are_one_line_that_says_what_to_do(row, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [*BESIDE.get(row["command"], "").split(), *row["arguments"].split()]
    assert main([row["command"], *words]) == int(row["status"])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert row["words"] in error
