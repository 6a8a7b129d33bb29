"""From logits to the next token: temperature, top-k, top-p, and a random generator per text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one text are drawn.

    Temperature 0 always takes the likeliest token and ignores the other settings. top_k > 0 draws
    from the k likeliest tokens. top_p < 1 draws from the smallest set of likeliest tokens whose
    probabilities, after temperature and top_k, sum to at least top_p (Holtzman et al. 2020, "The
    Curious Case of Neural Text Degeneration").
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise InputError for a number outside its range."""
        for name in ("temperature", "top_k", "seed"):
            require_non_negative(name, getattr(self, name))
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: expected more than 0, at most 1")
        if self.seed >= 2**63:
            raise InputError(f"seed {self.seed}: expected less than 2^63")

    def generator(self) -> torch.Generator:
        """A new random generator for one text, on the CPU."""
        return torch.Generator().manual_seed(self.seed)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from logits fp32 [V] on the CPU; all tokens tied for the k-th place stay."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        threshold = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    # The maximum is subtracted before dividing: a tiny temperature would make all of them infinite.
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def require_non_negative(name: str, number: float) -> None:
    """Raise InputError naming `name` for a negative number, an infinity or NaN."""
    if not 0 <= number < float("inf"):
        raise InputError(f"{name} {number}: expected 0 or more")


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """`probabilities` [V] with zeros outside the likeliest tokens that sum to `top_p`."""
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    sum_of_likelier = ordered.cumsum(0) - ordered
    return probabilities.index_fill(0, tokens[sum_of_likelier >= top_p], 0.0)
