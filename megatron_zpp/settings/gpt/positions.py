"""How positions enter the GPT: the kind of embedding, and how rotary frequencies are scaled."""

import math
from dataclasses import dataclass

from megatron_zpp.settings.flag import flags_in
from megatron_zpp.settings.gpt.layer_pattern import marks_of
from megatron_zpp.settings.gpt.sizes import PRETRAINED, LatentAttentionConfig, SizeConfig
from zeropp.errors import InputError
from zeropp.settings import Rule

_flag = flags_in(
    "gpt/positions.toml",
    {
        "latent attention has --mscale and --mscale-all-dim instead": lambda c: (
            c.model.multi_latent_attention
        ),
        "latent attention always turns neighbouring channels": lambda c: (
            c.model.multi_latent_attention
        ),
        "latent attention scales frequencies by YaRN here: --rotary-scaling-factor": lambda c: (
            c.model.multi_latent_attention and c.model.rope_type == "yarn"
        ),
    },
    no_effect=(PRETRAINED,),
)


@dataclass(frozen=True, kw_only=True)
class PositionConfig(LatentAttentionConfig):
    """Positions: learned, rotary, or as biases on scores."""

    position_embedding_type: str = _flag(
        "learned_absolute",
        shorthands={
            "use-rotary-position-embeddings": "rope",
            "use-alibi-position-embeddings": "alibi",
        },
    )
    rotary_percent: float = _flag(1.0)
    rotary_base: float = _flag(10000.0)
    rotary_interleaved: bool = _flag(False)
    use_rope_scaling: bool = _flag(False)
    rope_scaling_factor: float = _flag(8.0)
    rope_scaling_low_freq_factor: float = _flag(1.0)
    rope_scaling_high_freq_factor: float = _flag(4.0)
    rope_scaling_original_positions: int = _flag(8192)
    rotary_seq_len_interpolation_factor: float = _flag(1.0)
    rotary_base_local: float | None = _flag(None)
    no_rope_freq: str | None = _flag(None)
    rope_type: str = _flag("rope")
    rotary_scaling_factor: float = _flag(1.0)
    yarn_original_max_position_embeddings: int = _flag(4096)
    yarn_beta_fast: float = _flag(32.0)
    yarn_beta_slow: float = _flag(1.0)
    yarn_attention_factor: float = _flag(1.0)
    mscale: float = _flag(1.0)
    mscale_all_dim: float = _flag(0.0)
    yarn_correction_range_round_to_int: bool = _flag(True)
    llama_4_scaling_beta: float | None = _flag(None)
    longrope_short_factors: tuple[float, ...] | None = _flag(None)
    longrope_long_factors: tuple[float, ...] | None = _flag(None)
    longrope_original_positions: int = _flag(4096)
    longrope_attention_factor: float = _flag(1.0)

    rules = (
        *SizeConfig.rules,
        Rule(
            ("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"),
            lambda low, high: low >= high,
            "{} is not below {}: frequencies between them are mixed",
        ),
    )

    @property
    def layers_without_rope(self) -> tuple[bool, ...]:
        """For each layer, whether it has no rotary positions although others may have them."""
        if self.no_rope_freq is None:
            return (False,) * self.num_layers
        return marks_of(self.no_rope_freq, self.num_layers, "--no-rope-freq")

    @property
    def head_dim(self) -> int:
        """Channels of one head's queries and keys."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Channels of one head's values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rotary positions turn."""
        is_latent = self.multi_latent_attention
        return int((self.qk_pos_emb_head_dim if is_latent else self.head_dim) * self.rotary_percent)

    @property
    def turned_scale(self) -> float:
        """What YaRN multiplies turned channels of queries and keys by."""
        if not self.multi_latent_attention:
            return self.yarn_attention_factor
        return self.yarn_growth(self.mscale) / self.yarn_growth(self.mscale_all_dim)

    def yarn_growth(self, scale: float) -> float:
        """Return 1 + `scale` / 10 ln(factor): m(`scale`) of DeepSeek's YaRN."""
        return 1.0 + 0.1 * scale * math.log(max(self.rotary_scaling_factor, 1.0))

    def check(self) -> None:
        """Raise InputError for rotary positions that the sizes do not allow, or scaled twice."""
        super().check()
        if self.multi_latent_attention:
            self._check_latent_attention()
        if self.position_embedding_type == "rope" and self.rotary_channels % 2:
            width = self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_dim
            raise InputError(
                f"rotary positions turn pairs of channels, but {width} channels x "
                f"--rotary-percent {self.rotary_percent:g} is odd: change the head size or percent"
            )
        self._check_rotary_scaling()

    def _check_latent_attention(self) -> None:
        if self.position_embedding_type != "rope":
            raise InputError(
                f"--position-embedding-type {self.position_embedding_type} with "
                "--multi-latent-attention, whose positions are rotary: give "
                "--position-embedding-type rope"
            )
        if self.num_query_groups not in (None, self.num_attention_heads):
            raise InputError(
                f"--multi-latent-attention and --num-query-groups {self.num_query_groups} "
                "contradict: every head has keys and values of its own: leave one out"
            )

    def _check_rotary_scaling(self) -> None:
        counts = {
            "--longrope-short-factors": len(self.longrope_short_factors or ()),
            "--longrope-long-factors": len(self.longrope_long_factors or ()),
        }
        expected = self.rotary_channels // 2
        if any(counts.values()) and set(counts.values()) != {expected}:
            texts = " and ".join(f"{name} has {count}" for name, count in counts.items())
            raise InputError(
                f"{texts} numbers: expected {expected} of each, one for each pair of channels that "
                "rotary positions turn"
            )
        scalings = {
            "--use-rope-scaling": self.use_rope_scaling and not self.multi_latent_attention,
            "--rope-type yarn": self.rope_type == "yarn",
            "--longrope-long-factors": any(counts.values()),
            "--rotary-seq-len-interpolation-factor": self.rotary_seq_len_interpolation_factor > 1,
        }
        used = [name for name, is_on in scalings.items() if is_on]
        if len(used) > 1:
            raise InputError(f"{' and '.join(used)} contradict: frequencies are scaled in one way")
