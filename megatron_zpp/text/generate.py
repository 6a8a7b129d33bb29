"""Text generation, token by token and for many prompts at once, with a key-value cache.

With a sharded model every rank calls with the same arguments, since all ranks together gather the
weights of each layer. Rank 0 draws the tokens and broadcasts them, so that all ranks continue and
stop together. Each text has its own settings and random generator, and does not depend on the texts
that are generated with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.gpt import GPT
from megatron_zpp.text.detokenizer import IncrementalDetokenizer
from megatron_zpp.text.sampling import Sampling, require_non_negative, sample
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError
from zeropp.ranks import broadcast_object, rank

STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"  # the reasons why a text ended


@dataclass(frozen=True, kw_only=True)
class Request:
    """One text to generate; an empty prompt starts after an end of document.

    The text ends before an end of document, a token of `stop_tokens` or a text of `stop_texts`.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 64
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The text that one more token of a request brought; it may be empty."""

    row: int  # index of the request
    text: str
    num_tokens: int  # generated so far, including one that ended the text
    finish_reason: str | None = None  # STOP, LENGTH or CANCELLED in the last piece of a request


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """The continuation of `prompt`: up to `max_new_tokens` tokens, or to an end of document.

    The tokens that the model's tokenizer puts before every text come before the prompt.

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
    """Yield the pieces of all texts as they are generated.

    `is_cancelled(row)` is called on rank 0 before each token. The model sees the last
    `num_positions` tokens; a text that grows longer is recomputed for each token, as without a
    cache. The model is in eval mode while the generator runs. Raises InputError, before any
    computation, for a prompt longer than the model's positions, ids outside the vocabulary and
    numbers out of range.
    """
    for request in requests:
        check(request, model.config.num_positions, tokenizer.vocab_size)
    return _pieces(model, tokenizer, requests, is_cancelled, use_cache)


def check(request: Request, num_positions: int, vocab_size: int) -> None:
    """Raise InputError for a request that does not fit a model and tokenizer of these sizes."""
    require_non_negative("max_new_tokens", request.max_new_tokens)
    request.sampling.check()
    if len(request.prompt) > num_positions:
        raise InputError(
            f"the prompt has {len(request.prompt):,} tokens, but the model has {num_positions:,} "
            "positions: shorten the prompt"
        )
    outside = [
        token for token in (*request.prompt, *request.stop_tokens) if not 0 <= token < vocab_size
    ]
    if outside:
        raise InputError(f"token id {outside[0]} is outside the {vocab_size:,} ids of the model")
    if "" in request.stop_texts:
        raise InputError("a stop text is empty: leave it out")


class _Row:
    """One row of the batch: a request and its text so far."""

    def __init__(self, number: int, request: Request, tokenizer: Tokenizer) -> None:
        self.number = number
        self.request = request
        self.tokens = list(request.prompt) or [tokenizer.eod]
        self.stop_tokens = {tokenizer.eod, *request.stop_tokens}
        self.generator = request.sampling.generator()
        self.detokenizer = IncrementalDetokenizer(tokenizer, self.tokens, request.stop_texts)
        self.tokens_left = request.max_new_tokens
        self.finish_reason: str | None = None if self.tokens_left else LENGTH

    def sample(self, logits: Tensor) -> int:
        """The next token, from logits fp32 [V] on the CPU."""
        return sample(logits, self.request.sampling, self.generator)

    def advance(self, token: int | None) -> Piece:
        """Append a token; None means that the request was cancelled."""
        text = ""
        if token is None:
            self.finish_reason = CANCELLED
        else:
            self.tokens_left -= 1
            text = self._append(token)
        if self.finish_reason is not None:
            text += self.detokenizer.finish()
        return self.piece(text)

    def piece(self, text: str) -> Piece:
        """`text` with the number of tokens so far and the reason why the text ended."""
        return Piece(
            row=self.number,
            text=text,
            num_tokens=self.request.max_new_tokens - self.tokens_left,
            finish_reason=self.finish_reason,
        )

    def _append(self, token: int) -> str:
        if token in self.stop_tokens:
            self.finish_reason = STOP
            return ""
        self.tokens.append(token)
        text = self.detokenizer.feed(token)
        if self.detokenizer.stopped:
            self.finish_reason = STOP
        elif not self.tokens_left:
            self.finish_reason = LENGTH
        return text


def _pieces(
    model: GPT,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    is_cancelled: Callable[[int], bool],
    use_cache: bool,
) -> Iterator[Piece]:
    rows = [_Row(number, request, tokenizer) for number, request in enumerate(requests)]
    yield from (row.piece("") for row in rows if row.finish_reason)
    rows = [row for row in rows if not row.finish_reason]
    was_training, cache = model.training, None
    model.eval()
    try:
        while rows:
            if not use_cache or (cache and max(cache.lengths) == cache.num_slots):
                cache = None
            is_empty = cache is None
            cache = cache or _make_cache(model, rows)
            logits = _logits(model, cache, rows, is_empty)[:, : tokenizer.vocab_size]
            tokens = None
            if rank() == 0:
                tokens = [
                    None if is_cancelled(row.number) else row.sample(row_logits)
                    for row, row_logits in zip(rows, logits.float().cpu(), strict=True)
                ]
            for row, token in zip(rows, broadcast_object(tokens), strict=True):
                yield row.advance(token)
            unfinished = [index for index, row in enumerate(rows) if not row.finish_reason]
            if 0 < len(unfinished) < len(rows):
                cache.select_rows(unfinished)
            rows = [rows[index] for index in unfinished]
    finally:
        model.train(was_training)


def _make_cache(model: GPT, rows: Sequence[_Row]) -> KeyValueCache:
    """A cache with slots for the longest possible text of these rows, up to the positions."""
    longest = max(len(row.tokens) + row.tokens_left for row in rows)
    slots = min(longest, model.config.num_positions)
    return KeyValueCache(model.config.num_layers, len(rows), slots)


@torch.no_grad()
def _logits(model: GPT, cache: KeyValueCache, rows: Sequence[_Row], is_empty: bool) -> Tensor:
    """Logits [B, V] of the next token of each row; an empty cache gets all tokens of the rows."""
    device = next(model.parameters()).device
    limit = cache.num_slots if is_empty else 1
    new = [row.tokens[-limit:] for row in rows]
    counts = [len(tokens) for tokens in new]
    padded = [tokens + [0] * (max(counts) - len(tokens)) for tokens in new]
    cache.prepare(counts, device)
    logits = model(torch.tensor(padded, device=device), cache=cache)[:, -1]
    if not logits.isfinite().all():
        raise InputError("the model's logits are not finite: its weights are damaged")
    return logits
