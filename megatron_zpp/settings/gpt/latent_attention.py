"""Multi-head latent attention: the widths of its latents and of its heads."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import flags_in
from megatron_zpp.settings.gpt.sizes import PRETRAINED, SizeConfig

_flag = flags_in("gpt/latent_attention.toml", no_effect=(PRETRAINED,))


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(SizeConfig):
    """Latent attention (DeepSeek-V2): keys and values are computed from one latent per token."""

    multi_latent_attention: bool = _flag(False)
    q_lora_rank: int | None = _flag(None)
    kv_lora_rank: int = _flag(32)
    qk_head_dim: int = _flag(128)
    qk_pos_emb_head_dim: int = _flag(64)
    v_head_dim: int = _flag(128)
