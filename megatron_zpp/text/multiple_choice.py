"""Which of several endings a model finds likeliest, by two rules.

By the sum of an ending's log-probabilities, and by that sum divided by its length in characters,
which does not prefer short endings and does not depend on the tokenizer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_zpp.data.instructions.examples import read_objects, text_of
from megatron_zpp.text.scoring import Passage, Scorer, standard_error
from zeropp.errors import InputError

QUESTIONS, CHOICES, ANSWER = ("question", "context"), "choices", "answer"
WANTED = "question (or context), choices and answer"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Shares of questions answered right, by sum and by sum over length, with standard errors.

    `chance` is what guessing gives; `cut` counts endings whose context was cut on its left.
    """

    questions: int
    accuracy: float
    standard_error: float
    normalized_accuracy: float
    normalized_standard_error: float
    chance: float
    cut: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A context, its endings, and the number of the right one."""

    where: str
    context: str
    endings: tuple[str, ...]
    answer: int


def measure_choices(scorer: Scorer, path: str, limit: int | None = None) -> Choices:
    """Accuracy on the first `limit` questions of a .jsonl; of equal endings the first is taken.

    Raises InputError for what cannot be read.
    """
    questions = list(islice(_questions(path), limit))
    if not questions:
        raise InputError(f"{path}: no questions")
    passages: list[Passage] = []
    cut = 0
    for question in questions:
        for ending in question.endings:
            joint = "" if question.context[-1:].isspace() or ending[:1].isspace() else " "
            passage, is_cut = scorer.continued(question.context, joint + ending, question.where)
            passages.append(passage)
            cut += is_cut
    scores = iter([score.log_probability for score in scorer.score(passages)])
    right = normalized = 0
    for question in questions:
        sums = list(islice(scores, len(question.endings)))
        means = [one / len(text) for one, text in zip(sums, question.endings, strict=True)]
        right += sums.index(max(sums)) == question.answer
        normalized += means.index(max(means)) == question.answer
    count = len(questions)
    return Choices(
        questions=count,
        accuracy=right / count,
        standard_error=standard_error(right / count, count),
        normalized_accuracy=normalized / count,
        normalized_standard_error=standard_error(normalized / count, count),
        chance=sum(1 / len(question.endings) for question in questions) / count,
        cut=cut,
    )


def _questions(path: str) -> Iterator[Question]:
    for where, fields in read_objects(path):
        name = next((one for one in QUESTIONS if one in fields), None)
        if name is None or CHOICES not in fields or ANSWER not in fields:
            found = ", ".join(map(repr, fields)) or "none"
            raise InputError(f"{where}: expected {WANTED}; its fields are {found}")
        endings = _endings(fields[CHOICES], where)
        answer = fields[ANSWER]
        if type(answer) is not int or not 0 <= answer < len(endings):
            raise InputError(
                f"{where}: {ANSWER!r} is {json.dumps(answer)}, expected the number of a choice, "
                f"0 to {len(endings) - 1}"
            )
        context = text_of(fields, name, where)
        yield Question(where=where, context=context, endings=endings, answer=answer)


def _endings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2:
        raise InputError(f"{where}: {CHOICES!r} holds {json.dumps(value)[:60]}, expected two texts")
    endings = tuple(text_of({CHOICES: one}, CHOICES, where) for one in value)
    if not all(ending.strip() for ending in endings):
        raise InputError(f"{where}: one of the {CHOICES} is empty")
    return endings
