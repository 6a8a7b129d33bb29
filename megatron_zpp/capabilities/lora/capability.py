"""What LoRA says of a GPT's run, and MixZ++, which stores the weights that it freezes as codes."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import lt
from typing import Any

from torch import nn

from megatron_zpp.capabilities.lora import adapters
from megatron_zpp.model.gpt import GPT
from megatron_zpp.recipe.capability import Capability
from zeropp import InputError

log = logging.getLogger("megatron_zpp")


@dataclass(kw_only=True)
class LoraCapability(Capability):
    """Adapters are trained; the weights beside them are frozen, and perhaps stored as codes."""

    setting = ("lora.lora_rank", partial(lt, 0))

    def extend(self, model: GPT) -> None:
        """Add adapters to a model."""
        adapters.add_adapters(model, self.config.lora)

    def initialize(self, model: nn.Module) -> None:
        """Draw the adapters."""
        adapters.initialize_adapters(model, self.config.training.seed)

    def require_stages(self, model: GPT, stages: Sequence[range]) -> None:
        """Raise InputError if a stage has nothing to train."""
        for index, layers in enumerate(stages):
            parameters = (each for layer in layers for each in model.blocks[layer].parameters())
            if not any(parameter.requires_grad for parameter in parameters):
                raise InputError(
                    f"--lora-target-modules leaves nothing to train in layers {layers.start} to "
                    f"{layers.stop - 1}, stage {index} of the pipeline: name layers in every stage"
                )

    def require_saved(self, saved: Mapping[str, Any], folder: str) -> None:
        """Raise InputError if the loaded adapters were trained with another scaling.

        Logs a line if they were trained with another base model.
        """
        lora, saved = self.config.lora, saved.get("lora", {})
        if not saved.get("lora_rank"):
            return
        if lora.scaling != saved["lora_alpha"] / saved["lora_rank"]:
            raise InputError(
                f"--lora-alpha {lora.lora_alpha:g}: the adapters in {folder} were trained with "
                f"{saved['lora_alpha']:g}: give that value, as another one would change what they "
                "add to the weights"
            )
        if lora.pretrained_checkpoint != saved["pretrained_checkpoint"]:
            log.info(
                f"the adapters in {folder} were trained on the model "
                f"{saved['pretrained_checkpoint']}, not {lora.pretrained_checkpoint}: they fit no "
                "other weights"
            )

    def model_rows(self, model: GPT) -> Iterator[tuple[str, str]]:
        """Yield how many parameters are trained, and how the others are stored."""
        lora = self.config.lora
        num_trained = model.num_parameters(trained_only=True)
        text = (
            f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}: {num_trained:,} parameters are "
            "trained"
        )
        if self.config.model.has_experts and not adapters.adapts_experts(lora, self.config.model):
            text += f"\nexperts have none: --lora-target-modules {' '.join(adapters.EXPERT_LAYERS)}"
        if (bits := self.config.zero.placement.frozen_bits) is not None:
            text += f"\nthe frozen weights are stored and gathered as INT{bits} (MixZ++)"
        yield "LoRA", text


CAPABILITY = LoraCapability
