"""Perplexity is the exponential of the mean cross-entropy of the predicted tokens."""

import math
from pathlib import Path

import pytest

from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.text.perplexity import Perplexity, measure_perplexity
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.text.peaked_model import CLOSE, log_probabilities, peaked_model
from zeropp.errors import InputError

MODEL = peaked_model()
EOD = MODEL.tokenizer.eod


def expected(*documents: tuple[list[int], int]) -> Perplexity:
    """Of documents that the model can take whole, and the first label of each."""
    each = []
    for ids, first in documents:
        each += log_probabilities(MODEL.model, ids, first)[0]
    loss = -sum(each) / len(each)
    return Perplexity(
        documents=len(documents), tokens=len(each), loss=pytest.approx(loss, **CLOSE),
        perplexity=pytest.approx(math.exp(loss), rel=1e-4),
    )  # fmt: skip


def test_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    result = measure_perplexity(MODEL, str(tmp_path / "a.txt"))
    assert result == expected(([*b"one document"], 1)) and result.tokens == 11


def test_a_text_longer_than_the_model(tmp_path: Path) -> None:
    """Windows of 32 predictions one after another, or with at least 24 tokens before a label."""
    text = bytes(range(32, 112))
    (tmp_path / "a.txt").write_bytes(text)
    parts = [([*text[at : at + 33]], 1) for at in (0, 32, 64)]
    result = measure_perplexity(MODEL, str(tmp_path / "a.txt"))
    assert (result.loss, result.tokens) == (expected(*parts).loss, 79)
    parts = [([*text[at : at + 33]], 25 if at else 1) for at in range(0, 48, 8)]
    parts.append(([*text[48:]], 25))
    result = measure_perplexity(MODEL, str(tmp_path / "a.txt"), stride=8)
    assert (result.loss, result.tokens) == (expected(*parts).loss, 79)


def test_examples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "Why?", "answer": " So."}, {"text": "Yes"})
    question, answer = ([*b"Why? So.", EOD], 4), ([*b"Yes", EOD], 1)
    assert measure_perplexity(MODEL, path) == expected(question, answer)
    assert measure_perplexity(MODEL, path, limit=1) == expected(question)


def test_an_indexed_dataset(tmp_path: Path) -> None:
    """Documents of several sequences, and of one token, which has no prediction."""
    documents = [[[1, 2, 3], [4, 5, EOD]], [[7]], [[9, 8, EOD]]]
    write_dataset(tmp_path / "a", 258, documents)
    result = measure_perplexity(MODEL, str(tmp_path / "a"))
    reference = expected(([1, 2, 3, 4, 5, EOD], 1), ([9, 8, EOD], 1))
    assert (result.loss, result.tokens, result.documents) == (reference.loss, 7, 3)
    write_dataset(tmp_path / "b", 400, [[[3, 300]]])
    with pytest.raises(InputError, match="ids 3 to 300, but the model's tokenizer has 257"):
        measure_perplexity(MODEL, str(tmp_path / "b"))
