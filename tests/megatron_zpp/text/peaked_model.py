"""A tiny model of bytes with distinct probabilities, and its log-probabilities computed plainly."""

import torch
import torch.nn.functional as F

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import ModelConfig
from megatron_zpp.text.text_model import TextModel
from megatron_zpp.tokenizer.base import ByteLevelTokenizer

POSITIONS = 32
# Sums of a few dozen fp32 log-probabilities of size 5, computed in batches of other shapes.
CLOSE = dict(rel=1e-5)


def peaked_config(**changes: object) -> ModelConfig:
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=POSITIONS)
    return ModelConfig(**sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes)


def peaked_model() -> TextModel:
    """The model in memory, on this rank alone."""
    tokenizer = ByteLevelTokenizer()
    model = GPT(peaked_config(init_method_std=0.3), tokenizer.vocab_size)
    initialize(model, 3, model.config)
    return TextModel(name="peaked", model=model.eval(), tokenizer=tokenizer)


@torch.no_grad()
def log_probabilities(model: GPT, ids: list[int], first: int) -> tuple[list[float], bool]:
    """Log-probability of each id from `first` on, and whether each is the likeliest."""
    text = torch.tensor([ids])
    logits = model(text[:, :-1])[0].double()
    values = -F.cross_entropy(logits, text[0, 1:], reduction="none")[first - 1 :]
    return values.tolist(), bool((logits.argmax(1) == text[0, 1:])[first - 1 :].all())
