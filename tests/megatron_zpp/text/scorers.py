"""A tiny model that reads bytes, and what it should say, for the tests of evaluations."""

import torch
import torch.nn.functional as F

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.text.scoring import Scorer
from megatron_zpp.tokenizer.byte_level import ByteLevelTokenizer

POSITIONS = 32
# Sums of a few dozen fp32 log-probabilities of size 5, computed in batches of other shapes.
CLOSE = dict(rel=1e-5)


def config(**changes: object) -> ModelConfig:
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=POSITIONS)
    return ModelConfig(**sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes)


def scorer(batch_size: int = 3, longest: int = POSITIONS) -> Scorer:
    """A model whose weights are large enough for its opinions to differ."""
    tokenizer = ByteLevelTokenizer()
    model = GPT(config(init_method_std=0.3), tokenizer.vocab_size)
    initialize(model, 3, model.config)
    return Scorer(
        model=model.eval(), tokenizer=tokenizer, longest=longest, batch_size=batch_size
    )


@torch.no_grad()
def plainly(model: GPT, ids: list[int], first: int) -> tuple[list[float], bool]:
    """Log-probability of each id from `first` on, and whether each is the likeliest."""
    text = torch.tensor([ids])
    logits = model(text[:, :-1])[0].double()
    found = -F.cross_entropy(logits, text[0, 1:], reduction="none")[first - 1 :]
    return found.tolist(), bool((logits.argmax(1) == text[0, 1:])[first - 1 :].all())
