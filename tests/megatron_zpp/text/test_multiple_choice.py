"""Multiple choice by both rules, against sums computed plainly."""

from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.text.multiple_choice import measure_choices
from tests.megatron_zpp.data.instructions.test_examples import write
from tests.megatron_zpp.text.scorers import plainly, scorer
from zeropp.errors import InputError

JUDGE = scorer()
DRAWN = np.random.default_rng(1)
QUESTIONS = [
    {
        "question": "".join(map(chr, DRAWN.integers(97, 123, 6))),
        "choices": ["".join(map(chr, DRAWN.integers(97, 123, size))) for size in (2, 7, 12)],
    }
    for _ in range(12)
]


def sums(question: dict) -> list[float]:
    """The log-probability of each choice with the space before it."""
    context, found = question["question"], []
    for choice in question["choices"]:
        ids = [*f"{context} {choice}".encode()]
        found.append(sum(plainly(JUDGE.model, ids, len(context))[0]))
    return found


def test_both_rules(tmp_path: Path) -> None:
    """The answers are what the sums say: all right by one rule, fewer by the other."""
    by_sum = [int(np.argmax(sums(question))) for question in QUESTIONS]
    by_mean = [
        int(np.argmax(np.array(sums(one)) / [len(choice) for choice in one["choices"]]))
        for one in QUESTIONS
    ]
    same = sum(a == b for a, b in zip(by_sum, by_mean, strict=True))
    assert same < 12  # the rules differ here
    lines = [one | {"answer": a} for one, a in zip(QUESTIONS, by_sum, strict=True)]
    found = measure_choices(JUDGE, write(tmp_path / "a.jsonl", *lines))
    assert (found.accuracy, found.standard_error) == (1.0, 0.0)
    assert found.normalized_accuracy == same / 12
    share = same / 12
    assert found.normalized_standard_error == pytest.approx((share * (1 - share) / 11) ** 0.5)
    assert (found.questions, found.chance, found.cut) == (12, pytest.approx(1 / 3), 0)
    lines = [one | {"answer": a} for one, a in zip(QUESTIONS, by_mean, strict=True)]
    found = measure_choices(JUDGE, write(tmp_path / "a.jsonl", *lines), limit=5)
    assert (found.questions, found.normalized_accuracy) == (5, 1.0)


def test_a_space_is_put_in_only_where_there_is_none(tmp_path: Path) -> None:
    spaced = [
        {"context": context, "choices": [f"{space}{end}" for end in ("ab", "cd")], "answer": 0}
        for context, space in (("what", " "), ("what ", ""), ("what", ""))
    ]
    seen = []

    class Listening(type(JUDGE)):
        def continued(self, context: str, continuation: str, where: str):
            seen.append(context + continuation)
            return super().continued(context, continuation, where)

    judge = Listening(model=JUDGE.model, tokenizer=JUDGE.tokenizer, longest=32)
    measure_choices(judge, write(tmp_path / "a.jsonl", *spaced))
    assert seen == ["what ab", "what cd"] * 3


GOOD = {"question": "a", "choices": ["b", "c"], "answer": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"question": "a", "choices": ["b", "c"]}, "line 2: expected question .* 'question', 'cho"),
        (GOOD | {"answer": 2}, "line 2: 'answer' is 2, expected the number of a choice, 0 to 1"),
        (GOOD | {"answer": "b"}, "line 2: 'answer' is \"b\", expected the number"),
        (GOOD | {"answer": True}, "line 2: 'answer' is true"),
        (GOOD | {"choices": ["b"]}, r'line 2: \'choices\' holds \["b"\], expected two texts'),
        (GOOD | {"choices": "bc"}, "line 2: 'choices' holds \"bc\", expected two texts"),
        (GOOD | {"choices": ["b", " "]}, "line 2: one of the choices is empty"),
        (GOOD | {"choices": ["b", 3]}, "line 2: 'choices' holds 3, expected a string"),
    ],
)
def test_bad_input(line: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        measure_choices(JUDGE, write(tmp_path / "a.jsonl", GOOD, line))


def test_no_questions(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no questions"):
        measure_choices(JUDGE, write(tmp_path / "a.jsonl"))
