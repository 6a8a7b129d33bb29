"""Whether a model guesses the last word of a passage, as in LAMBADA (Paperno and others, 2016).

The word counts if the likeliest token is the right one at each of its tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from megatron_zpp.data.instructions.examples import TEXT, read_objects, text_of
from megatron_zpp.settings.data import EXAMPLES_SUFFIX
from megatron_zpp.text.scoring import Passage, Scorer, exponential, standard_error
from megatron_zpp.tokenizer.base import read_text
from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """`accuracy` with its standard error; `perplexity` of a word; passages cut on their left."""

    passages: int
    accuracy: float
    standard_error: float
    perplexity: float
    cut: int


def measure_last_words(scorer: Scorer, path: str, limit: int | None = None) -> LastWords:
    """Last-word accuracy on the first `limit` passages: lines of a .jsonl ("text") or of a text.

    Raises InputError for what cannot be read and for a passage of a single word.
    """
    cut, passages = 0, []
    for where, text in islice(_passages(path), limit):
        passage, is_cut = _last_word(scorer, text, where)
        cut += is_cut
        passages.append(passage)
    if not passages:
        raise InputError(f"{path}: no passages")
    scores = list(scorer.score(passages))
    accuracy = sum(score.is_greedy for score in scores) / len(scores)
    loss = -sum(score.log_probability for score in scores) / len(scores)
    return LastWords(
        passages=len(scores),
        accuracy=accuracy,
        standard_error=standard_error(accuracy, len(scores)),
        perplexity=exponential(loss),
        cut=cut,
    )


def _passages(path: str) -> Iterator[tuple[str, str]]:
    """Where a passage stands, and the passage."""
    if not path.endswith(EXAMPLES_SUFFIX):
        for number, line in enumerate(read_text(path, "the passages").split("\n"), start=1):
            if line.strip():
                yield f"{path}, line {number}", line
        return
    for where, fields in read_objects(path):
        if TEXT not in fields:
            found = ", ".join(map(repr, fields)) or "none"
            raise InputError(f"{where}: expected {TEXT!r}; its fields are {found}")
        yield where, text_of(fields, TEXT, where)


def _last_word(scorer: Scorer, text: str, where: str) -> tuple[Passage, bool]:
    """The word belongs to the space before it, as byte-pair tokens do."""
    text = text.strip()
    parts = text.rsplit(None, 1)
    if len(parts) < 2:
        raise InputError(f"{where}: {text[:60]!r} has no word before its last one")
    return scorer.continued(parts[0], text[len(parts[0]) :], where)
