"""Log-probabilities of tokens under a model: what perplexity and task evaluation are made of.

Passages of similar length share a batch and are padded on the right, which a causal model does not
see. Log-probabilities are natural logarithms, computed in fp32 whatever the model's dtype.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import chunked_cross_entropy
from zeropp.ranks import gather_objects, rank, world_size


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Token ids; those from index `first` (at least 1) on are scored, each given all before it."""

    ids: Sequence[int]
    first: int = 1


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of the log-probabilities of `num_tokens` tokens; whether each one was the likeliest."""

    log_probability: float
    num_tokens: int
    is_greedy: bool


FILLER = Passage(ids=(0, 0))


def score_passages(model: GPT, passages: Sequence[Passage], batch_size: int) -> list[Score]:
    """The score of each passage, in order, on all ranks.

    All ranks call with the same passages, and the batches are dealt out among them. A sharded
    model's forward pass needs all ranks, so a rank with fewer batches than others computes FILLER.
    """
    batches = batches_by_length([len(passage.ids) for passage in passages], batch_size)
    rounds = -(-len(batches) // world_size())
    own = batches[rank() :: world_size()]
    scores: dict[int, Score] = {}
    for batch in own:
        new = _score_batch(model, [passages[index] for index in batch])
        scores.update(zip(batch, new, strict=True))
    for _ in range(rounds - len(own)):
        _score_batch(model, [FILLER])
    for scores_of_rank in gather_objects(scores):
        scores.update(scores_of_rank)
    return [scores[index] for index in range(len(passages))]


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """The indices of `lengths`, the longest first, in batches."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def windows(document: Passage, longest: int, stride: int) -> Iterator[Passage]:
    """Passages of at most `longest` + 1 tokens that score each scored token of `document` once.

    A passage begins `stride` (1 to longest) tokens after the one before it, so that each scored
    token has at least longest - stride + 1 tokens before it, or all that there are.
    """
    assert 0 < stride <= longest and document.first > 0
    next_label, num_tokens = document.first, len(document.ids)
    for start in range(0, num_tokens, stride):
        end = min(start + longest + 1, num_tokens)
        if next_label < end:
            yield Passage(ids=document.ids[start:end], first=next_label - start)
            next_label = end


@torch.no_grad()
def _score_batch(model: GPT, passages: Sequence[Passage]) -> list[Score]:
    device = next(model.parameters()).device
    longest = max(len(passage.ids) for passage in passages)
    tokens = torch.zeros((len(passages), longest), dtype=torch.int64)
    is_scored = torch.zeros((len(passages), longest - 1), dtype=torch.bool)
    for row, passage in enumerate(passages):
        assert 0 < passage.first < len(passage.ids)
        tokens[row, : len(passage.ids)] = torch.as_tensor(passage.ids, dtype=torch.int64)
        is_scored[row, passage.first - 1 : len(passage.ids) - 1] = True
    counts = is_scored.sum(dim=1).tolist()
    tokens, is_scored = tokens.to(device), is_scored.to(device)
    labels = tokens[:, 1:][is_scored]  # [T], T = sum of counts
    logits = model(tokens[:, :-1].contiguous())[is_scored]  # [T, V]
    losses = chunked_cross_entropy(logits, labels, None).double()  # [T]
    is_likeliest = logits.argmax(dim=1) == labels  # [T]
    return [
        Score(
            log_probability=-row_losses.sum().item(),
            num_tokens=len(row_losses),
            is_greedy=bool(row_is_likeliest.all()),
        )
        for row_losses, row_is_likeliest in zip(
            losses.split(counts), is_likeliest.split(counts), strict=True
        )
    ]
