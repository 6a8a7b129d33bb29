"""The tool on checkpoints of ours and on Hugging Face folders: table, JSON, errors."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_zpp.settings.config import TokenizerConfig
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.models.foreign_models import add_tokenizer, llama, save_own, saved
from tests.megatron_zpp.text.scorers import config
from tools.evaluate import main

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    save, _ = save_own(config(), tmp_path_factory.mktemp("save"), BYTES)
    return str(save)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Flags for one of each kind."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    question = {"question": "a", "choices": ["b", "c"], "answer": 1}
    asked = write(tmp_path / "b.jsonl", question)
    text = str(tmp_path / "a.txt")
    return ["--data-path", text, "--last-word", text, "--choices", asked]


def test_table_and_json(checkpoints: str, files: list[str], tmp_path: Path, capsys) -> None:
    output = tmp_path / "found.json"
    assert main(["--load", checkpoints, *files, "--json", str(output)]) == 0
    table = capsys.readouterr().out
    assert main(["--load", checkpoints, *files, "--json", "-"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found == json.loads(output.read_text())
    (text,), (word,), (choice,) = (
        found[name] for name in ("perplexity", "last_word", "multiple_choice")
    )
    assert text["perplexity"] == math.exp(text["loss"]) and text["tokens"] == 21
    assert (word["passages"], choice["questions"], choice["chance"]) == (1, 1, 0.5)
    assert found["seq_length"] == 32
    for shown in (f"{text['perplexity']:.4f} on {files[1]}", "last-word", "by chance 50.00%"):
        assert shown in table


@pytest.mark.parametrize("opens", [False, True])
def test_a_hugging_face_folder(opens: bool, tmp_path: Path, capsys) -> None:
    """Its loss is that of transformers, whose logits differ by 1e-5 from ours (test_convert_hf)."""
    theirs = llama()
    folder = saved(theirs, tmp_path / "llama")
    add_tokenizer(folder, opens=opens)
    (tmp_path / "a.txt").write_text("the cat sat on mat and a dog ran to it")
    flags = ["--data-path", str(tmp_path / "a.txt"), "--json", "-"]
    assert main(["--load", str(folder), *flags]) == 0
    found = json.loads(capsys.readouterr().out)["perplexity"][0]
    ids = torch.arange(0 if opens else 1, 12)[None]  # the words of the tokenizer, in order
    with torch.no_grad():
        logits = theirs(ids[:, :-1]).logits[0]
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, ids[0, 1:]).item(), abs=2e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "give --load, and what to measure"),
        ("--load {load}", "give --load, and what to measure"),
        ("--data-path a.txt", "give --load, and what to measure"),
        ("--load {none} --data-path a.txt", "expected a folder of checkpoints"),
        ("--load {load} --data-path {none}.txt", "none.txt: no such file, and no dataset"),
        ("--load {load} --choices a.txt {none}.jsonl", "none.jsonl: no such file, and no dataset"),
        ("--load {load} --data-path a.txt --seq-length 33", "33: the model has 32 positions"),
        ("--load {none} --data-path a.txt --json {none}/x", "--json {none}/x: there is no folder"),
        ("--load {load} --data-path a.txt --batch-size 0", "--batch-size 0"),
        ("--load {load} --data-path a.txt --speed 3", "unknown flag --speed"),
    ],
)
def test_errors(
    flags: str, said: str, checkpoints: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    words = flags.format(load=checkpoints, none=tmp_path / "none").split()
    assert main(words) == 1
    assert said.format(none=tmp_path / "none") in capsys.readouterr().err


def test_what_was_measured_before_a_bad_file_is_shown(
    checkpoints: str, files: list[str], tmp_path: Path, capsys
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    more = ["--choices", str(tmp_path / "bad.jsonl"), "--json", str(tmp_path / "found.json")]
    assert main(["--load", checkpoints, *files[:4], *more]) == 1
    found = capsys.readouterr()
    assert "perplexity" in found.out and "last-word accuracy" in found.out
    assert "bad.jsonl, line 1: not JSON" in found.err
    assert json.loads((tmp_path / "found.json").read_text()).keys() >= {"perplexity", "last_word"}


def test_one_rank_only(checkpoints: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["--load", checkpoints, "--data-path", __file__]) == 1
    assert "evaluation takes one rank, not 2" in capsys.readouterr().err


def test_help(capsys) -> None:
    assert main(["--help"]) == 0
    assert "--last-word" in capsys.readouterr().out
