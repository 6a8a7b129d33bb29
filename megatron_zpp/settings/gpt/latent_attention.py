"""Multi-head latent attention: the widths of its latents and of its heads."""

from dataclasses import dataclass
from functools import partial

from megatron_zpp.settings.flag import needs
from megatron_zpp.settings.gpt.sizes import SizeConfig, model_flag

_NEEDS_LATENT = needs("--multi-latent-attention", lambda c: c.model.multi_latent_attention)
_latent_flag = partial(model_flag, no_effect=(_NEEDS_LATENT,))


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(SizeConfig):
    """Latent attention (DeepSeek-V2): keys and values are computed from one latent per token."""

    multi_latent_attention: bool = model_flag(
        False, "keys and values of all heads come from one narrow latent of a token (MLA)"
    )
    q_lora_rank: int | None = _latent_flag(
        None,
        "MLA: width of the queries' latent (default: none, queries are computed directly)",
        minimum=1,
    )
    kv_lora_rank: int = _latent_flag(32, "MLA: width of the latent of keys and values", minimum=1)
    qk_head_dim: int = _latent_flag(
        128, "MLA: channels of a head's queries and keys without positions", minimum=1
    )
    qk_pos_emb_head_dim: int = _latent_flag(
        64, "MLA: channels with rotary positions, of whose keys all heads share one", minimum=1
    )
    v_head_dim: int = _latent_flag(128, "MLA: channels of a head's values", minimum=1)
