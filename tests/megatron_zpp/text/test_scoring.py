"""Scores of continuations: each label once, whatever is beside it; windows; contexts cut."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.text.scoring import Passage, windows
from tests.megatron_zpp.text.scorers import CLOSE, POSITIONS, plainly, scorer
from zeropp.errors import InputError


def test_scores_are_those_of_each_passage_alone() -> None:
    """In order, over several groups and batches, each as long as it likes."""
    judge, drawn = scorer(), torch.Generator().manual_seed(0)
    passages = []
    for _ in range(70):
        length = int(torch.randint(2, POSITIONS + 2, (), generator=drawn))
        ids = torch.randint(256, (length,), generator=drawn).tolist()
        passages.append(Passage(ids=ids, first=int(torch.randint(1, length, (), generator=drawn))))
    found = list(judge.score(passages))
    assert len(found) == 70
    for passage, score in zip(passages, found, strict=True):
        each, greedy = plainly(judge.model, passage.ids, passage.first)
        assert score.log_probability == pytest.approx(sum(each), **CLOSE)
        assert (score.num_tokens, score.is_greedy) == (len(each), greedy)


@torch.no_grad()
def test_weights_that_are_no_good() -> None:
    judge = scorer()
    judge.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="logits are not finite"):
        list(judge.score([Passage(ids=[1, 2, 3])]))


@torch.no_grad()
def test_what_the_model_would_write_is_greedy() -> None:
    judge = scorer()
    ids = [7, 8]
    for _ in range(5):
        ids.append(int(judge.model(torch.tensor([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 256]
    found = judge.score([Passage(ids=ids, first=2), Passage(ids=other, first=2)])
    assert [score.is_greedy for score in found] == [True, False]


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_windows_score_each_label_once_with_enough_before_it(length, longest, data) -> None:
    stride = data.draw(st.integers(1, longest))
    first = data.draw(st.integers(1, length))
    text, seen = list(range(length)), []
    for passage in windows(text, longest, stride, first):
        assert 2 <= len(passage.ids) <= longest + 1 and passage.first >= 1
        for place in range(passage.first, len(passage.ids)):
            label = passage.ids[place]
            assert passage.ids[:place] == text[label - place : label]
            assert place >= min(label, longest - stride + 1)
            seen.append(label)
    assert seen == text[first:]


def test_a_continuation_is_scored_and_the_context_cut() -> None:
    judge = scorer()
    assert judge.continued("ab", " c", "here") == (Passage(ids=[*b"ab c"], first=2), False)
    eod = judge.tokenizer.eod
    assert judge.continued("", "c", "here") == (Passage(ids=[eod, *b"c"], first=1), False)
    whole, is_cut = judge.continued("x" * 31, "yz", "here")
    assert (whole, is_cut) == (Passage(ids=[*b"x" * 31, *b"yz"], first=31), False)
    assert len(whole.ids) == POSITIONS + 1
    cut, is_cut = judge.continued("w" + "x" * 31, "yz", "here")
    assert is_cut and cut == whole
    with pytest.raises(InputError, match="here: ByteLevelTokenizer makes no token of ''"):
        judge.continued("ab", "", "here")
    with pytest.raises(InputError, match="here: 33 tokens to score, more than the 32"):
        judge.continued("ab", "y" * 33, "here")


def test_tokens_that_reach_over_the_border_are_scored() -> None:
    """Where the context's last token changes in the whole text, it belongs to what is scored."""

    class Pairs:
        name, eod = "Pairs", 9

        def prompt(self, text: str) -> list[int]:
            return [len(text[at : at + 2]) for at in range(0, len(text), 2)]

    judge = scorer()
    odd = type(judge)(model=judge.model, tokenizer=Pairs(), longest=POSITIONS)
    assert odd.continued("abc", "def", "here")[0] == Passage(ids=[2, 2, 2], first=1)
