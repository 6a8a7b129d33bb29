"""Text from a model, token by token and for many prompts at once, with a key-value cache.

With a sharded model every rank calls with the same arguments, and all gather the same weights. The
first rank draws and tells the others, so that all go on and stop together. Each text has its own
settings and random numbers: it does not depend on the texts beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.model.cache import KeyValueCache
from megatron_zpp.model.gpt import GPT
from megatron_zpp.text.sampling import Sampling, at_least_zero, sample
from megatron_zpp.text.stream import TextStream
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError
from zeropp.ranks.coordination import broadcast_object, rank

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"  # why a text ended


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to be made; an empty prompt starts after an end of document.

    It ends before an end of document, before one of `stop_tokens`, or before one of `stop_texts`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one more token brought: text, possibly none, and why it was the last, if it was."""

    row: int
    text: str
    num_tokens: int  # drawn so far, one that ended the text included
    finish: str | None = None


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """The continuation of `prompt`: up to `max_new_tokens` tokens, up to an end of document.

    What the model's tokenizer puts before every text stands before it.

    Raises InputError as `stream` does.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    request = Request(
        prompt=tuple(tokenizer.prompt(prompt)), max_new_tokens=max_new_tokens, sampling=sampling
    )
    return complete(model, tokenizer, [request])[0]


def complete(model: GPT, tokenizer: Tokenizer, requests: Sequence[Request]) -> list[str]:
    """The whole text of each request; raises InputError as `stream` does."""
    texts = [""] * len(requests)
    for piece in stream(model, tokenizer, requests):
        texts[piece.row] += piece.text
    return texts


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    *,
    is_cancelled: Callable[[int], bool] = lambda row: False,
    use_cache: bool = True,
) -> Iterator[Piece]:
    """Pieces of all texts as they come; the last of each text has `finish`.

    `is_cancelled(row)` is asked on the first rank before each token. The context is the last
    `num_positions` tokens; a text that is longer has all of them computed again for each token, as
    without a cache. While it runs the model is in eval mode. Raises InputError, before anything
    runs, for a prompt longer than the positions, ids outside the vocabulary and numbers out of
    range.
    """
    for request in requests:
        check(request, model.config.num_positions, tokenizer.vocab_size)
    return _pieces(model, tokenizer, requests, is_cancelled, use_cache)


def check(request: Request, num_positions: int, vocab_size: int) -> None:
    """Raise InputError for what a model and tokenizer of these sizes cannot make a text of."""
    at_least_zero("max_new_tokens", request.max_new_tokens)
    request.sampling.check()
    if len(request.prompt) > num_positions:
        raise InputError(
            f"the prompt has {len(request.prompt):,} tokens, but the model has {num_positions:,} "
            "positions: shorten the prompt"
        )
    named = (*request.prompt, *request.stop_tokens)
    outside = [token for token in named if not 0 <= token < vocab_size]
    if outside:
        raise InputError(f"token id {outside[0]} is outside the {vocab_size:,} ids of the model")
    if "" in request.stop_texts:
        raise InputError("a stop text is empty: leave it out")


class _Row:
    """A text in the making."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer) -> None:
        self.number = number
        self.request = request
        self.tokens = list(request.prompt) or [tokenizer.eod]
        self.ends = {tokenizer.eod, *request.stop_tokens}
        self.generator = request.sampling.generator()
        self.text = TextStream(tokenizer, self.tokens, request.stop_texts)
        self.left = request.max_new_tokens
        self.finish: str | None = None if self.left else LENGTH

    def draw(self, logits: Tensor) -> int:
        """The next token, from logits fp32 [V] on the CPU."""
        return sample(logits, self.request.sampling, self.generator)

    def take(self, token: int | None) -> Piece:
        """Go on by a token; None: the text was cancelled."""
        text = ""
        if token is None:
            self.finish = CANCELLED
        else:
            self.left -= 1
            text = self._taken(token)
        if self.finish is not None:
            text += self.text.finish()
        return self.piece(text)

    def piece(self, text: str) -> Piece:
        """`text` with where the row stands."""
        drawn = self.request.max_new_tokens - self.left
        return Piece(row=self.number, text=text, num_tokens=drawn, finish=self.finish)

    def _taken(self, token: int) -> str:
        if token in self.ends:
            self.finish = STOP
            return ""
        self.tokens.append(token)
        text = self.text.feed(token)
        if self.text.stopped:
            self.finish = STOP
        elif not self.left:
            self.finish = LENGTH
        return text


def _pieces(
    model: GPT,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    is_cancelled: Callable[[int], bool],
    use_cache: bool,
) -> Iterator[Piece]:
    every = [_Row(number, request, tokenizer) for number, request in enumerate(requests)]
    yield from (row.piece("") for row in every if row.finish)
    rows = [row for row in every if not row.finish]
    was_training, cache = model.training, None
    model.eval()
    try:
        while rows:
            if not use_cache or (cache and max(cache.lengths) == cache.num_slots):
                cache = None
            fresh = cache is None
            cache = cache or _make_cache(model, rows)
            logits = _logits(model, cache, rows, fresh)[:, : tokenizer.vocab_size]
            drawn = None
            if rank() == 0:
                drawn = [
                    None if is_cancelled(row.number) else row.draw(row_logits)
                    for row, row_logits in zip(rows, logits.float().cpu(), strict=True)
                ]
            for row, token in zip(rows, broadcast_object(drawn), strict=True):
                yield row.take(token)
            going = [index for index, row in enumerate(rows) if not row.finish]
            if 0 < len(going) < len(rows):
                cache.keep(going)
            rows = [rows[index] for index in going]
    finally:
        model.train(was_training)


def _make_cache(model: GPT, rows: Sequence[_Row]) -> KeyValueCache:
    """A cache with room for all that these rows may become, up to the model's positions."""
    longest = max(len(row.tokens) + row.left for row in rows)
    slots = min(longest, model.config.num_positions)
    return KeyValueCache(model.config.num_layers, len(rows), slots)


@torch.no_grad()
def _logits(model: GPT, cache: KeyValueCache, rows: Sequence[_Row], fresh: bool) -> Tensor:
    """Logits [B, V] of the next token of each row; `fresh`: the cache holds nothing yet."""
    device = next(model.parameters()).device
    limit = cache.num_slots if fresh else 1
    new = [row.tokens[-limit:] for row in rows]
    counts = [len(tokens) for tokens in new]
    padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in new]
    cache.expect(counts, device)
    logits = model(torch.tensor(padded, device=device), cache=cache)[:, -1]
    if not logits.isfinite().all():
        raise InputError("the model's logits are not finite: its weights are no good")
    return logits
