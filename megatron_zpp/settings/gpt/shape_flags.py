"""Flags that describe a model whose checkpoint does not."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag


@dataclass(frozen=True, kw_only=True)
class ShapeFlags(Section):
    """What a checkpoint of torchtitan does not say of its model"""

    num_attention_heads: int | None = flag(None, "query heads (n_heads)", minimum=1)
    rotary_base: float | None = flag(None, "base of the rotary frequencies (rope_theta)", minimum=1)
    rope_scaling_factor: float | None = flag(
        None, "scaling_factor of rope_scaling_args; 1: not scaled (default 8)", minimum=1
    )
    layernorm_epsilon: float | None = flag(None, "norm_eps (default 1e-5)", above=0)
    seq_length: int | None = flag(None, "seq_len of the training (default 8192)", minimum=1)
