"""Last words: the right ones are found by a model that writes them, and by plain arithmetic."""

import math
from pathlib import Path

import pytest
import torch

from megatron_zpp.text.last_word import measure_last_words
from megatron_zpp.text.scoring import Scorer
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.text.scorers import plainly, scorer
from zeropp.errors import InputError

JUDGE = scorer()


def test_accuracy_and_perplexity(tmp_path: Path) -> None:
    """Each passage against the model asked plainly for all bytes of space and word."""
    texts = [f"the {word} sat on {end}" for word in ("cat", "dog", "cow") for end in ("it", "a b")]
    texts = [f"  {text}\n" for text in texts]
    path = write(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    found = measure_last_words(JUDGE, path)
    greedy, total = 0, 0.0
    for text in texts:
        ids = JUDGE.tokenizer.encode(text.strip())
        each, hit = plainly(JUDGE.model, ids, len(text.strip().rpartition(" ")[0]))
        greedy, total = greedy + hit, total + sum(each)
    assert (found.passages, found.cut) == (6, 0)
    assert found.accuracy == greedy / 6
    assert found.perplexity == pytest.approx(math.exp(-total / 6), rel=1e-4)
    assert found.standard_error == math.sqrt(found.accuracy * (1 - found.accuracy) / 5)


class Numbers:
    """Whole numbers to their ids; what the tests of a greedy word need."""

    name, eod = "Numbers", 0

    def prompt(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@torch.no_grad()
def test_a_word_that_the_model_would_write_counts(tmp_path: Path) -> None:
    judge = Scorer(model=JUDGE.model, tokenizer=Numbers(), longest=32)
    right = [f"{n} 5 7 {judge.model(torch.tensor([[n, 5, 7]]))[0, -1].argmax()}" for n in range(6)]
    wrong = [f"{line.rpartition(' ')[0]} 999" for line in right[:2]]
    wrong = [line.replace("999", "3" if not right[0].endswith(" 3") else "4") for line in wrong]
    (tmp_path / "a.txt").write_text("\n".join([*right, "", *wrong]))
    found = measure_last_words(judge, str(tmp_path / "a.txt"))
    assert (found.passages, found.accuracy) == (8, 0.75)
    assert measure_last_words(judge, str(tmp_path / "a.txt"), limit=6).accuracy == 1.0


def test_a_long_context_is_cut_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "x" * 40 + " a"}, {"text": "x a"})
    assert measure_last_words(JUDGE, path).cut == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no passages"),
        ([{"text": "a b"}, {"text": " alone "}], "line 2: 'alone' has no word before its last"),
        ([{"words": "a b"}], "line 1: expected 'text'; its fields are 'words'"),
        ([{"text": 3}], "line 1: 'text' holds 3"),
        ([{"text": "a " + "b" * 40}], "line 1: 41 tokens to score, more than the 32"),
    ],
)
def test_bad_input(lines: list, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        measure_last_words(JUDGE, write(tmp_path / "a.jsonl", *lines))
