"""How positions enter the GPT: the kind of embedding, and how rotary frequencies are scaled."""

import math
from dataclasses import dataclass
from functools import partial

from megatron_zpp.settings.flag import NoEffect, needs
from megatron_zpp.settings.gpt.latent_attention import LatentAttentionConfig
from megatron_zpp.settings.gpt.layer_pattern import marks_of
from megatron_zpp.settings.gpt.sizes import SizeConfig, model_flag
from zeropp.errors import InputError
from zeropp.settings.schema import Rule

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "alibi", "none")
ROPE_TYPES = ("rope", "yarn")
NEEDS_ROPE = needs(
    "--position-embedding-type rope", lambda c: c.model.position_embedding_type == "rope"
)
_NEEDS_WINDOW = needs("--window-size", lambda c: c.model.window_size)
_NEEDS_YARN = needs("--rope-type yarn", lambda c: c.model.rope_type == "yarn")
_NEEDS_LONGROPE = needs("--longrope-long-factors", lambda c: c.model.longrope_long_factors)
_NEEDS_ROPE_SCALING = needs("--use-rope-scaling", lambda c: c.model.use_rope_scaling)
_rope_flag = partial(model_flag, no_effect=(NEEDS_ROPE,))
_llama_flag = partial(model_flag, no_effect=(_NEEDS_ROPE_SCALING,))
_yarn_flag = partial(model_flag, no_effect=(NEEDS_ROPE, _NEEDS_YARN))
_LATENT = NoEffect(
    "latent attention has --mscale and --mscale-all-dim instead",
    when=lambda c: c.model.multi_latent_attention,
)
_NEEDS_LATENT = needs(
    "--multi-latent-attention; --yarn-attention-factor is for other attention",
    lambda c: c.model.multi_latent_attention,
)
_PAIRS = NoEffect(
    "latent attention always turns neighbouring channels",
    when=lambda c: c.model.multi_latent_attention,
)
_LATENT_YARN = NoEffect(
    "latent attention scales frequencies by YaRN here: --rotary-scaling-factor",
    when=lambda c: c.model.multi_latent_attention and c.model.rope_type == "yarn",
)
_mscale_flag = partial(model_flag, no_effect=(_NEEDS_LATENT, _NEEDS_YARN))
_longrope_flag = partial(model_flag, no_effect=(NEEDS_ROPE, _NEEDS_LONGROPE))


@dataclass(frozen=True, kw_only=True)
class PositionConfig(LatentAttentionConfig):
    """Positions: learned, rotary, or as biases on scores."""

    position_embedding_type: str = model_flag(
        "learned_absolute",
        "how positions enter",
        choices=POSITION_EMBEDDINGS,
        shorthands={
            "use-rotary-position-embeddings": "rope",
            "use-alibi-position-embeddings": "alibi",
        },
        synonyms={"rotary": "rope", "absolute": "learned_absolute"},  # BigScience's names
    )
    rotary_percent: float = _rope_flag(
        1.0, "share of a head's channels that rotary positions turn", above=0, maximum=1
    )
    rotary_base: float = _rope_flag(
        10000.0,
        "base of the rotary frequencies",
        minimum=1,
        aliases=("rotary-position-embeddings-theta",),
    )
    rotary_interleaved: bool = model_flag(
        False,
        "turn neighbouring channels as pairs, instead of channels i and i + half",
        no_effect=(NEEDS_ROPE, _PAIRS),
    )
    use_rope_scaling: bool = model_flag(
        False,
        "scale rotary frequencies as Llama 3.1 does, for contexts beyond 8192 tokens",
        no_effect=(NEEDS_ROPE, _LATENT_YARN),
    )
    rope_scaling_factor: float = _llama_flag(
        8.0, "--use-rope-scaling divides the slow frequencies by this", minimum=1
    )
    rope_scaling_low_freq_factor: float = _llama_flag(
        1.0,
        "--use-rope-scaling divides frequencies with fewer turns in the original context",
        above=0,
    )
    rope_scaling_high_freq_factor: float = _llama_flag(
        4.0, "it leaves frequencies with more turns in the original context unchanged", above=0
    )
    rope_scaling_original_positions: int = _llama_flag(
        8192, "context length of the original training, in tokens", minimum=1
    )
    rotary_seq_len_interpolation_factor: float = _rope_flag(
        1.0, "positions are divided by this before they are turned", minimum=1
    )
    rotary_base_local: float | None = model_flag(
        None,
        "base of the rotary frequencies, not scaled, in layers with a window (default: as others)",
        minimum=1,
        no_effect=(NEEDS_ROPE, _NEEDS_WINDOW),
    )
    no_rope_freq: str | None = _rope_flag(
        None,
        "layers without rotary positions: every N-th, or a list with a 1 for each, as [0,0,0,1]*8",
    )
    rope_type: str = _rope_flag(
        "rope",
        "kind of rotary positions; yarn slows slow frequencies for longer texts",
        choices=ROPE_TYPES,
    )
    rotary_scaling_factor: float = _yarn_flag(
        1.0, "YaRN: context length divided by that of the original training", minimum=1
    )
    yarn_original_max_position_embeddings: int = _yarn_flag(
        4096, "YaRN: context length of the original training, in tokens", minimum=1
    )
    yarn_beta_fast: float = _yarn_flag(
        32.0, "YaRN: frequencies with more turns in the original context stay unchanged", above=0
    )
    yarn_beta_slow: float = _yarn_flag(
        1.0, "YaRN: frequencies with fewer turns are divided by --rotary-scaling-factor", above=0
    )
    yarn_attention_factor: float = model_flag(
        1.0,
        "what YaRN multiplies queries and keys by",
        above=0,
        no_effect=(NEEDS_ROPE, _NEEDS_YARN, _LATENT),
    )
    mscale: float = _mscale_flag(
        1.0,
        "MLA with YaRN: turned channels are multiplied by m(this) / m(--mscale-all-dim), where "
        "m(s) = 1 + s / 10 ln(--rotary-scaling-factor)",
        minimum=0,
    )
    mscale_all_dim: float = _mscale_flag(
        0.0, "MLA with YaRN: scores are multiplied by m(this) squared", minimum=0
    )
    yarn_correction_range_round_to_int: bool = _yarn_flag(
        True,
        "YaRN: do not round the bounds between fast and slow channels to whole channels",
        aliases=("yarn-correction-range-round-to-int",),
        shorthands={"no-yarn-correction-range-round-to-int": False},
    )
    llama_4_scaling_beta: float | None = model_flag(
        None,
        "YaRN: queries at position p are multiplied by 1 + this * ln(1 + floor(p / context length "
        "of the original training))",
        above=0,
        no_effect=(NEEDS_ROPE, _NEEDS_YARN),
    )
    longrope_short_factors: tuple[float, ...] | None = _longrope_flag(
        None, "LongRoPE: divisors of the rotary frequencies, one for each", above=0
    )
    longrope_long_factors: tuple[float, ...] | None = _rope_flag(
        None, "LongRoPE: the same for texts longer than --longrope-original-positions", above=0
    )
    longrope_original_positions: int = _longrope_flag(
        4096, "context length of the original training, in tokens", minimum=1
    )
    longrope_attention_factor: float = _longrope_flag(
        1.0, "what LongRoPE multiplies queries and keys by", above=0
    )

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
