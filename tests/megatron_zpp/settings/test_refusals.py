"""What the command line refuses: each message names the culprit and says what to do."""

import json
from pathlib import Path

import pytest

from tests.megatron_zpp.settings.command_lines import error_of
from tests.megatron_zpp.settings.tables import rows

BESIDE = {
    "": "",
    "experts": "--num-experts 8 --disable-bias-linear ",
    "latent": "--mock-data --multi-latent-attention ",
    "pipeline": "--pipeline-model-parallel-size 4 ",
    "tiny": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --make-vocab-size-divisible-by 8 ",
}


@pytest.mark.parametrize("row", rows("refusals.tsv"), ids=lambda row: row["flags"][:60])
def test_what_is_refused_is_named(row: dict[str, str], tmp_path: Path) -> None:
    """Where a JSON contradicts flags, the message names its file too."""
    file = json.loads(row["json"]) if row["json"] else None
    message = error_of(BESIDE[row["beside"]] + row["flags"], int(row["ranks"]), file, tmp_path)
    for words in row["words"].split(" ... "):
        assert words in message
    assert "contradict" not in message or file is None or "ds.json" in message


def test_all_mistakes_of_a_command_line_are_reported_at_once() -> None:
    first, *mistakes = error_of("--vocab-fil 2 --lr fast --seed 1 --hidden-sise").splitlines()
    assert first == "3 mistakes in the command line:" and len(mistakes) == 3
    assert mistakes[0].startswith("  unknown flag --vocab-fil; ")
    assert mistakes[1].startswith("  --lr fast: expected a number")
    assert mistakes[2].startswith("  unknown flag --hidden-sise; ")
