"""The flags of LoRA: adapters of a model that was trained before."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_zpp.settings.flag import Section, flag, needs
from zeropp.settings import requires

A, B = "lora_A", "lora_B"  # PEFT's names of the matrices of an adapter
_NEEDS_LORA = needs("--lora-rank", lambda c: c.lora.lora_rank)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters beside frozen weights, of a model that was trained before."""

    pretrained_checkpoint: str | None = flag(
        None, "model to start from: a folder of checkpoints, or a Hugging Face folder"
    )
    lora_rank: int = flag(0, "rank of LoRA's adapters; 0: all weights are trained", minimum=0)
    lora_alpha: float = flag(16.0, "scale adapters by alpha / rank", above=0, no_effect=_NEEDS_LORA)
    lora_dropout: float = flag(
        0.0, "dropout before the adapters", minimum=0, maximum=1, no_effect=_NEEDS_LORA
    )
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "layers that get adapters (default: all of attention and MLPs, without experts)"
    )

    rules = (
        requires(
            "lora_rank",
            "pretrained_checkpoint",
            "{} freezes the model's weights: name the model that has them, "
            "--pretrained-checkpoint FOLDER",
        ),
        requires("lora_target_modules", "lora_rank", "{} needs --lora-rank above 0"),
    )

    @property
    def scaling(self) -> float:
        """What the adapters' product is multiplied by."""
        return self.lora_alpha / self.lora_rank


class FineTuning:
    """What a `Config` says of a run that starts from a trained model."""

    lora: LoraConfig

    @property
    def pretrained_checkpoint(self) -> str | None:
        """The model that training starts from; None where weights are drawn."""
        return self.lora.pretrained_checkpoint

    @property
    def trains_all(self) -> bool:
        """Whether all weights of the model are trained, and none is frozen."""
        return not self.lora.lora_rank

    def starting_from(self, path: str) -> Any:
        """Return the configuration with the path of the model that was opened."""
        return replace(self, lora=replace(self.lora, pretrained_checkpoint=path))


def step_key(config: Any) -> dict[str, Any]:
    """What the time of a step depends on in the settings of adapters, as JSON holds it."""
    if config.trains_all:
        return {}
    stored_bits = config.zero.placement.frozen_bits
    return {"lora_rank": config.lora.lora_rank, "stored_bits": stored_bits}


SECTIONS = {"lora": LoraConfig}
FACTS = (FineTuning,)
DELTA_MODULES = (A, B)
REASONS = {"LoRA trains neither": lambda c: c.lora.lora_rank > 0}  # without effect of a flag
STEP_KEYS = (step_key,)
OBSTACLES = {
    "zero_quantized_nontrainable_weights stores frozen weights quantized, and without --lora-rank "
    "all weights are trained: give a rank (finetune_gpt.py), or leave it out": (
        lambda c: c.zero.placement.frozen_bits is not None and not c.lora.lora_rank
    )
}
