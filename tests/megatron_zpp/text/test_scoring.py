"""Scores do not depend on the batch or the number of ranks; windows score each token once."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.text.scoring import Passage, score_passages, windows
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
