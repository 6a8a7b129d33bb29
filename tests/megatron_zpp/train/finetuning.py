"""Flags of short runs that fine-tune a tiny model, and a checkpoint as such a run writes it."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_zpp.capabilities.lora.adapters import add_adapters
from megatron_zpp.capabilities.lora.settings import LoraConfig
from megatron_zpp.checkpoint import checkpoint
from megatron_zpp.checkpoint.training_state import TrainingState, architecture
from megatron_zpp.interchange.open_model import open_model
from megatron_zpp.model.delta import is_of_delta
from megatron_zpp.model.gpt import GPT
from megatron_zpp.settings.config import Config
from tests.megatron_zpp.interchange.foreign_models import add_tokenizer, saved

SENTENCES = ("the cat sat on the mat", "a dog ran to it", "the dog sat on a cat and it ran")
MIXZ = {
    "stage": 3, "zero_quantized_nontrainable_weights": True, "zero_hpz_partition_size": 2,
}  # fmt: skip
RUN = "--train-iters 3 --micro-batch-size 1 --global-batch-size 4 --lora-rank 4 --lr-decay-style "
RUN += "constant --split 90,10,0 "


def flags_for(model: PreTrainedModel, folder: Path) -> str:
    """The flags of a model, which is saved in the folder, and of examples for it."""
    folder = saved(model, folder)
    add_tokenizer(folder)
    examples = folder / "examples.jsonl"
    lines = [
        {"prompt": sentence[: len(sentence) // 2], "answer": sentence[len(sentence) // 2 :]}
        for sentence in SENTENCES
    ]
    examples.write_text("".join(json.dumps(line) + "\n" for line in lines * 20))
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}"
    return f"{tokenizer} --pretrained-checkpoint {folder} --data-path {examples} {RUN}"


def folder_of(flags: str) -> str:
    """The folder of the model."""
    return flags.split("--pretrained-checkpoint ")[1].split()[0]


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
    """Return a model with random adapters of rank 4 that count twice; `save` has its checkpoint.

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
