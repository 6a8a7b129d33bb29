"""From logits to the next token: temperature, top-k, top-p, and a generator of its own per text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one text is drawn; temperature 0 takes the likeliest token always, and the rest is idle.

    top_k > 0 draws from the k likeliest only. top_p < 1 draws from the fewest likeliest tokens
    whose odds, after temperature and top_k, add up to top_p or more (Holtzman et al. 2020).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise InputError for a number out of its range."""
        for name in ("temperature", "top_k", "seed"):
            at_least_zero(name, getattr(self, name))
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: expected more than 0, at most 1")
        if self.seed >= 2**63:
            raise InputError(f"seed {self.seed}: expected less than 2^63")

    def generator(self) -> torch.Generator:
        """The random numbers of one text, on the CPU."""
        return torch.Generator().manual_seed(self.seed)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits fp32 [V] on the CPU; ties at the k-th place all stay in."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest is taken off first: a tiny temperature would make infinities of all of them.
    odds = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        odds = _nucleus(odds, sampling.top_p)
    return int(torch.multinomial(odds, 1, generator=generator))


def at_least_zero(name: str, number: float) -> None:
    """Raise InputError, naming it, for a negative number, an infinity or NaN."""
    if not 0 <= number < float("inf"):
        raise InputError(f"{name} {number}: expected 0 or more")


def _nucleus(odds: Tensor, top_p: float) -> Tensor:
    """`odds` [V] without what lies beyond the first tokens that add up to `top_p`."""
    ordered, tokens = odds.sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered  # what the likelier ones add up to
    return odds.index_fill(0, tokens[before >= top_p], 0.0)
