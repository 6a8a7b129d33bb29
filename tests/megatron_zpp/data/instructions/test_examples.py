"""Files of examples: the names of fields that are known, and what is wrong, with file and line."""

import json
from pathlib import Path

import pytest

from megatron_zpp.data.instructions.examples import read_examples
from megatron_zpp.settings.config import DataConfig
from megatron_zpp.settings.data import names_examples
from zeropp.errors import InputError


def write(path: Path, *lines: object) -> str:
    """A file of these lines, objects as JSON; its name."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("fields", "prompt", "answer"),
    [
        ({"prompt": "2+2=", "answer": " 4"}, "2+2=", " 4"),
        ({"prompt": "2+2=", "completion": " 4", "id": 7}, "2+2=", " 4"),
        ({"question": "Why?", "answer": "So."}, "Why?", "So."),
        ({"instruction": "Add.", "input": "2 2", "output": "4"}, "Add.\n\n2 2\n\n", "4"),
        ({"instruction": "Add.", "input": "", "output": "4"}, "Add.\n\n", "4"),
        ({"instruction": "Add.", "output": "4", "text": "all"}, "Add.\n\n", "4"),
        ({"text": "all of it"}, None, "all of it"),
    ],
)
def test_forms(fields: dict, prompt: str | None, answer: str, tmp_path: Path) -> None:
    (example,) = read_examples([write(tmp_path / "a.jsonl", fields)])
    assert (example.prompt, example.answer) == (prompt, answer)


def test_files_in_their_order_without_blank_lines(tmp_path: Path) -> None:
    first_path = write(
        tmp_path / "b.jsonl", "\ufeff" + json.dumps({"text": "1"}), "", {"text": "2"}
    )
    second_path = write(tmp_path / "a.jsonl", {"text": "3"})
    examples = list(read_examples([first_path, second_path]))
    assert [example.answer for example in examples] == ["1", "2", "3"]
    assert examples[1].location == f"{first_path}, line 3"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: not JSON .*0xff"):
        list(read_examples([str(tmp_path / "a.jsonl")]))


def test_which_paths_are_examples() -> None:
    assert names_examples(DataConfig(data_path=("a.jsonl", "b.jsonl")))
    assert names_examples(DataConfig(train_data_path=("a.jsonl",), valid_data_path=("b.jsonl",)))
    assert not names_examples(DataConfig()) and not names_examples(DataConfig(data_path=("a",)))
