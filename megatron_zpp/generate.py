"""Text from a model, one token at a time; every step runs the whole context anew.

With a sharded model every rank calls `generate` with the same arguments: each gathers the same
weights, computes the same logits and draws the same tokens, so all stop together.
"""

import torch
from torch import Tensor

from megatron_zpp.model.gpt import GPT
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError


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

    temperature 0 takes the likeliest token always; top_k > 0 draws from the k likeliest only. The
    context is the last `num_positions` tokens; an empty prompt starts after an end of document. The
    model is left in the mode, train or eval, it was in. Raises InputError for a negative number.
    """
    _check(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = tokenizer.encode(prompt) or [tokenizer.eod]
    start = len(tokens)
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = torch.tensor([tokens[-model.config.num_positions :]], device=device)
            with torch.no_grad():
                logits = model(context)[0, -1, : tokenizer.vocab_size]
            token = sample(logits.float().cpu(), temperature, top_k, generator)
            if token == tokenizer.eod:
                break
            tokens.append(token)
    finally:
        model.train(was_training)
    return tokenizer.decode(tokens[start:])


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw one token from logits fp32 [V] on the CPU; ties at the k-th place all stay in."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    odds = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(odds, 1, generator=generator))


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise InputError(f"{name} {number}: expected 0 or more")
