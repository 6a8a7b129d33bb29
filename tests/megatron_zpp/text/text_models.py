"""A checkpoint of a tiny model of bytes, as training leaves it, for tests of what writes text."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import Config, TokenizerConfig
from megatron_zpp.tokenizer.base import ByteLevelTokenizer
from tests.megatron_zpp.model.small import LLAMA
from tests.megatron_zpp.small_net import save_in

POSITIONS = 64
SHAPE = replace(LLAMA, seq_length=POSITIONS, init_method_std=0.2, normalization="LayerNorm")


def save_text_model(folder: Path, positions: int = POSITIONS) -> GPT:
    """Save it as iteration 1 in `folder`; returns the model. It never ends a document."""
    tokenizer, shape = ByteLevelTokenizer(), replace(SHAPE, seq_length=positions)
    with torch.device("meta"):
        model = GPT(shape, tokenizer.vocab_size)
    model.to_empty(device="cpu")
    initialize(model, 1, shape)
    with torch.no_grad():  # the last channel is always 1, and only the end's logit looks at it
        model.norm.weight[-1], model.norm.bias[-1] = 0, 1
        model.head.weight[:, -1] = 0
        model.head.weight[tokenizer.eod, -1] = -1000
    named = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
    state = TrainingState(
        iteration=1, consumed_samples=0, consumed_tokens=0, seed=1, world_size=1, stage=0,
        tokenizer=tokenizer.fingerprint,
        architecture=architecture(shape, tokenizer.vocab_size),
        configuration=Config(model=shape, tokenizer=named).to_dict(),
    )  # fmt: skip
    save_in(folder, model, None, state)
    return model.eval()
