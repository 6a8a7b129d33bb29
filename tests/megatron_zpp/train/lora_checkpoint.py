"""A checkpoint as fine-tuning with LoRA writes it, with random adapters and without a run."""

from pathlib import Path

import torch
from torch import Tensor

from megatron_zpp.capabilities.lora.adapters import add_adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import Config


class InMemoryWeights:
    """Weights in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def facts(self) -> dict[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def save_lora_checkpoint(
    base: Path, save: Path, *, is_whole: bool = True, targets: tuple[str, ...] | None = None
) -> GPT:
    """A model with adapters of rank 4 that count twice; its checkpoint is in `save`.

    One that is not whole holds what a run with MixZ++ saves: all but the frozen matrices.
    """
    opened = open_model(base)
    lora = LoraConfig(
        pretrained_checkpoint=str(base), lora_rank=4, lora_alpha=8.0, lora_dropout=0.1,
        lora_target_modules=targets,
    )  # fmt: skip
    model = add_adapters(GPT(opened.config, opened.tokenizer.vocab_size), lora)
    opened.fill(model)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_of_delta(name):
                parameter.normal_(0.0, 0.1, generator=generator)
    config = Config(model=opened.config, tokenizer=opened.tokenizer_config, lora=lora)
    state = TrainingState(
        iteration=5, consumed_samples=5, consumed_tokens=5, seed=1, world_size=1, stage=0,
        tokenizer=opened.tokenizer.fingerprint, configuration=config.to_dict(),
        architecture=architecture(opened.config, opened.tokenizer.vocab_size),
    )  # fmt: skip
    tensors = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if is_whole or is_of_delta(name) or parameter.ndim < 2
    }
    checkpoint.save_weights(save, InMemoryWeights(tensors), state)
    return model.eval()
