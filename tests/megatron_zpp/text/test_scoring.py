"""Scores do not depend on the batch or the number of ranks; windows; perplexity is made of them."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.text.perplexity import Perplexity, measure_perplexity
from megatron_zpp.text.scoring import Passage, score_passages, windows
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.text.peaked_model import (
    CLOSE,
    POSITIONS,
    log_probabilities,
    peaked_model,
)
from tests.ranks import ranks
from zeropp.errors import InputError


def random_passages(count: int) -> list[Passage]:
    generator = torch.Generator().manual_seed(0)
    passages = []
    for _ in range(count):
        length = int(torch.randint(2, POSITIONS + 2, (), generator=generator))
        ids = torch.randint(256, (length,), generator=generator).tolist()
        first = int(torch.randint(1, length, (), generator=generator))
        passages.append(Passage(ids=ids, first=first))
    return passages


def test_scores_are_those_of_each_passage_alone() -> None:
    """In order, over several groups and batches of passages of different lengths."""
    model, passages = peaked_model(), random_passages(70)
    scores = list(model.score(iter(passages), batch_size=3))
    assert len(scores) == 70
    for passage, score in zip(passages, scores, strict=True):
        expected, is_greedy = log_probabilities(model.model, passage.ids, passage.first)
        assert score.log_probability == pytest.approx(sum(expected), **CLOSE)
        assert (score.num_tokens, score.is_greedy) == (len(expected), is_greedy)


@ranks(3)
def test_ranks_share_the_batches_and_run_equally_many() -> None:
    """Also where there are fewer batches than ranks; every rank gets all scores."""
    model = peaked_model().model
    shapes: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(len(inputs[0])))
    for count, expected_rounds in [(1, 1), (6, 1), (8, 2), (0, 0)]:
        passages = random_passages(count)
        shapes.clear()
        scores = score_passages(model, passages, batch_size=2)
        num_forwards = [0] * 3
        dist.all_gather_object(num_forwards, len(shapes))
        assert num_forwards == [expected_rounds] * 3
        assert len(scores) == count
        for passage, score in zip(passages, scores, strict=True):
            expected, is_greedy = log_probabilities(model, passage.ids, passage.first)
            assert score.log_probability == pytest.approx(sum(expected), **CLOSE)
            assert score.is_greedy == is_greedy


@torch.no_grad()
def test_damaged_weights() -> None:
    model = peaked_model()
    model.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="logits are not finite"):
        list(model.score([Passage(ids=[1, 2, 3])], batch_size=1))


@torch.no_grad()
def test_only_the_likeliest_text_is_greedy() -> None:
    model = peaked_model()
    ids = [7, 8]
    for _ in range(5):
        ids.append(int(model.model(torch.tensor([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 256]
    scores = model.score([Passage(ids=ids, first=2), Passage(ids=other, first=2)], batch_size=2)
    assert [score.is_greedy for score in scores] == [True, False]


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_windows_score_each_label_once_with_enough_before_it(length, longest, data) -> None:
    stride = data.draw(st.integers(1, longest))
    first = data.draw(st.integers(1, length))
    text, labels = list(range(length)), []
    for passage in windows(Passage(ids=text, first=first), longest, stride):
        assert 2 <= len(passage.ids) <= longest + 1 and passage.first >= 1
        for place in range(passage.first, len(passage.ids)):
            label = passage.ids[place]
            assert passage.ids[:place] == text[label - place : label]
            assert place >= min(label, longest - stride + 1)
            labels.append(label)
    assert labels == text[first:]


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
