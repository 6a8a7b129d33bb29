"""How likely a model finds given continuations: the one thing that evaluations are made of.

Passages of like length are computed together, filled up on the right, where a causal model does not
look. Log-probabilities are natural, computed in fp32 whatever the dtype of the model.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import by_rows
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError

BATCHES_AT_ONCE = 16  # sorted by length; no more passages are in memory
PROGRESS_SECONDS = 10

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Token ids, of which those from `first` (at least 1) on are scored, each after all before."""

    ids: Sequence[int]
    first: int = 1


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of the log-probabilities of so many tokens; whether each was the likeliest."""

    log_probability: float
    num_tokens: int
    is_greedy: bool


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model in eval mode with its tokenizer; no passage has more than `longest` + 1 tokens."""

    model: GPT
    tokenizer: Tokenizer
    longest: int
    batch_size: int = 4

    def score(self, passages: Iterable[Passage]) -> Iterator[Score]:
        """A score for each passage, in order; says now and then how many are done.

        Raises InputError for a model whose weights give no numbers.
        """
        passages, done, said = iter(passages), 0, time.monotonic()
        while group := list(islice(passages, BATCHES_AT_ONCE * self.batch_size)):
            order = sorted(range(len(group)), key=lambda one: -len(group[one].ids))
            found: dict[int, Score] = {}
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                found.update(zip(batch, self._batch([group[one] for one in batch]), strict=True))
                done += len(batch)
                if time.monotonic() - said > PROGRESS_SECONDS:
                    said = time.monotonic()
                    log.info("%d passages are scored", done)
            yield from (found[one] for one in range(len(group)))

    def continued(self, context: str, continuation: str, where: str) -> tuple[Passage, bool]:
        """The continuation of a context as a passage, and whether the context had to be cut.

        Both are encoded together, as in a text, and scored from where this differs from the context
        alone; a context without tokens becomes an end of document. Raises InputError for a
        continuation without tokens, or with more than the model's positions.
        """
        alone, ids = self.tokenizer.prompt(context), self.tokenizer.prompt(context + continuation)
        pairs = enumerate(zip(alone, ids, strict=False))
        first = next((place for place, (a, b) in pairs if a != b), min(len(alone), len(ids)))
        if first == len(ids):
            raise InputError(
                f"{where}: {self.tokenizer.name} makes no token of {continuation.strip()!r}"
            )
        if first == 0:
            ids, first = [self.tokenizer.eod, *ids], 1
        if len(ids) - first > self.longest:
            raise InputError(
                f"{where}: {len(ids) - first} tokens to score, more than the {self.longest} that "
                "the model, or --seq-length, takes"
            )
        excess = max(0, len(ids) - self.longest - 1)
        return Passage(ids=ids[excess:], first=first - excess), excess > 0

    @torch.inference_mode()
    def _batch(self, passages: Sequence[Passage]) -> list[Score]:
        device = self.model.tokens.weight.device
        longest = max(len(passage.ids) for passage in passages)
        assert all(0 < p.first < len(p.ids) <= self.longest + 1 for p in passages)
        text = torch.zeros((len(passages), longest), dtype=torch.int64)
        scored = torch.zeros((len(passages), longest - 1), dtype=torch.bool)
        for row, passage in enumerate(passages):
            text[row, : len(passage.ids)] = torch.as_tensor(passage.ids, dtype=torch.int64)
            scored[row, passage.first - 1 : len(passage.ids) - 1] = True
        counts = scored.sum(dim=1).tolist()
        text, scored = text.to(device), scored.to(device)
        labels = text[:, 1:][scored]  # [T], T = sum of counts
        logits = self.model(text[:, :-1].contiguous())[scored]  # [T, V]
        losses = by_rows(logits, labels, None).double()
        if not losses.isfinite().all():
            raise InputError("the model's logits are not finite: its weights are no good")
        hits = logits.argmax(dim=1) == labels
        return [
            Score(
                log_probability=-loss.sum().item(),
                num_tokens=len(loss),
                is_greedy=bool(hit.all()),
            )
            for loss, hit in zip(losses.split(counts), hits.split(counts), strict=True)
        ]


def windows(ids: Sequence[int], longest: int, stride: int, first: int = 1) -> Iterator[Passage]:
    """The labels of a text from `first` on, each in one passage of at most `longest` + 1 tokens.

    A passage begins `stride` (1 to longest) tokens after the one before it, so that a label has at
    least longest - stride + 1 tokens before it, or all that there are.
    """
    assert 0 < stride <= longest and first > 0
    done = first  # the next label
    for start in range(0, len(ids), stride):
        end = min(start + longest + 1, len(ids))
        if done < end:
            yield Passage(ids=ids[start:end], first=done - start)
            done = end


def exponential(loss: float) -> float:
    """The perplexity of a loss in nats; infinity where a double cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def standard_error(share: float, count: int) -> float:
    """Of a share of `count` draws, by the unbiased variance; 0 for a single one."""
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0
