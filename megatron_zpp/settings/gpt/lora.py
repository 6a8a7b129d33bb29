"""LoRA: adapters of a model that was trained before."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag, needs
from zeropp.settings.schema import requires

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
