"""The GPT model: its shape and numerics, and how its weights are first drawn."""

import math
from dataclasses import dataclass

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import Section, flags_in
from megatron_zpp.settings.gpt.layer_pattern import marks_of, parse_window
from megatron_zpp.settings.gpt.sizes import PRETRAINED, LatentAttentionConfig, SizeConfig
from zeropp.errors import InputError
from zeropp.settings import Rule, declared, one_of, settings_of

OF_CAPABILITIES = tuple(declared("MODEL", CAPABILITIES))
# Of these, what only training uses: the run that saved a model may have another than one that loads
# it.
OF_TRAINING = tuple(
    entry.name
    for part in OF_CAPABILITIES
    for entry in settings_of(part)
    if PRETRAINED not in entry.no_effect
)
SWIGLU_MULTIPLE = 64
OF_HEADS = (  # what latent attention does not have
    "qk_layernorm_across_heads",
    "qk_layernorm_per_head",
    "qk_layernorm_after_rope",
    "llama_4_scaling_beta",
)
_NEEDS = {
    "an MLP with GELU": lambda c: c.model.has_gelu,
    "a gated MLP, such as --swiglu": lambda c: c.model.is_gated,
    "--normalization LayerNorm without --disable-norm-gain": lambda c: (
        c.model.normalization == "LayerNorm" and not c.model.disable_norm_gain
    ),
}
_REASONS = {
    "everything is fp32": lambda c: c.precision.format == "float32",
    "--position-embedding-type rope or none, which it needs, implies it": None,
}
_flag = flags_in("gpt/model.toml", _NEEDS | _REASONS, no_effect=(PRETRAINED,))
_switch = flags_in("gpt/model.toml", _REASONS)
_position = flags_in(
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
_NORMS = "{} contradict: there is no single normalization that the residual could follow"
_GAINS = "{} contradict: leave one of them out"
_CONTRADICTING_GAINS = (
    ("qk_layernorm_across_heads", "qk_layernorm_per_head"),
    ("qk_layernorm_across_heads", "disable_norm_gain"),
    ("qk_layernorm_per_head", "disable_norm_gain"),
    ("qk_layernorm_per_head", "apply_layernorm_1p"),
    ("apply_layernorm_1p", "disable_norm_gain"),
    ("apply_layernorm_1p", "disable_norm_bias"),
)
_ACTIVATIONS = "{} contradict: the MLP has one activation"


@dataclass(frozen=True, kw_only=True)
class PositionConfig(LatentAttentionConfig):
    """Positions: learned, rotary, or as biases on scores."""

    position_embedding_type: str = _position(
        "learned_absolute",
        shorthands={
            "use-rotary-position-embeddings": "rope",
            "use-alibi-position-embeddings": "alibi",
        },
    )
    rotary_percent: float = _position(1.0)
    rotary_base: float = _position(10000.0)
    rotary_interleaved: bool = _position(False)
    use_rope_scaling: bool = _position(False)
    rope_scaling_factor: float = _position(8.0)
    rope_scaling_low_freq_factor: float = _position(1.0)
    rope_scaling_high_freq_factor: float = _position(4.0)
    rope_scaling_original_positions: int = _position(8192)
    rotary_seq_len_interpolation_factor: float = _position(1.0)
    rotary_base_local: float | None = _position(None)
    no_rope_freq: str | None = _position(None)
    rope_type: str = _position("rope")
    rotary_scaling_factor: float = _position(1.0)
    yarn_original_max_position_embeddings: int = _position(4096)
    yarn_beta_fast: float = _position(32.0)
    yarn_beta_slow: float = _position(1.0)
    yarn_attention_factor: float = _position(1.0)
    mscale: float = _position(1.0)
    mscale_all_dim: float = _position(0.0)
    yarn_correction_range_round_to_int: bool = _position(True)
    llama_4_scaling_beta: float | None = _position(None)
    longrope_short_factors: tuple[float, ...] | None = _position(None)
    longrope_long_factors: tuple[float, ...] | None = _position(None)
    longrope_original_positions: int = _position(4096)
    longrope_attention_factor: float = _position(1.0)

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


@dataclass(frozen=True, kw_only=True)
class ModelConfig(*OF_CAPABILITIES, PositionConfig):
    """The GPT: its shape, its numerics and its initial weights."""

    init_method_std: float = _flag(0.02)
    hidden_dropout: float = _flag(0.1)
    attention_dropout: float = _flag(0.1)
    layernorm_epsilon: float = _flag(1e-5)
    normalization: str = _flag("LayerNorm")
    window_size: str | None = _flag(None)
    window_attn_skip_freq: str | None = _flag(None)
    query_pre_attn_scalar: float | None = _flag(None)
    attn_logit_softcapping: float | None = _flag(None)
    softmax_type: str = _flag("vanilla")
    final_logit_softcapping: float | None = _flag(None)
    embedding_multiplier: float = _flag(1.0)
    residual_multiplier: float = _flag(1.0)
    logits_scaling: float = _flag(1.0)
    scale_embeddings: bool = _flag(False)
    embed_layernorm: bool = _flag(False)
    apply_layernorm_1p: bool = _flag(False)
    disable_norm_bias: bool = _flag(False)
    disable_norm_gain: bool = _flag(False)
    norm_placement: str = _flag("pre")
    use_parallel_residual: bool = _flag(False)
    parallel_residual_single_norm: bool = _flag(False)
    swiglu: bool = _flag(False)
    geglu: bool = _flag(False)
    quick_geglu: bool = _flag(False)
    openai_gelu: bool = _flag(False)
    squared_relu: bool = _flag(False)
    relu: bool = _flag(False)
    reglu: bool = _flag(False)
    liglu: bool = _flag(False)
    glu_linear_offset: float = _flag(0.0)
    activation_func_clamp_value: float | None = _flag(None)
    xielu: bool = _flag(False)
    bias_gelu_fusion: bool = _flag(True)
    untie_embeddings_and_output_weights: bool = _flag(False)
    disable_bias_linear: bool = _flag(False)
    add_qkv_bias: bool = _flag(False)
    add_attention_output_bias: bool = _flag(False)
    add_mlp_bias: bool = _flag(False)
    qk_layernorm: bool = _flag(False)
    qk_layernorm_across_heads: bool = _flag(False)
    qk_layernorm_per_head: bool = _flag(False)
    qk_layernorm_after_rope: bool = _flag(False)
    apply_residual_connection_post_layernorm: bool = _flag(False)
    fp32_residual_connection: bool = _flag(False)

    rules = (
        *PositionConfig.rules,
        *(rule for each in OF_CAPABILITIES for rule in each.rules),
        Rule(
            ("softmax_type", "attn_logit_softcapping"),
            lambda kind, cap: kind != "vanilla" and cap is not None,
            "{} and {} contradict: scores with a cap have no sinks: leave one out",
        ),
        one_of("apply_residual_connection_post_layernorm", "use_parallel_residual", message=_NORMS),
        Rule(
            ("apply_residual_connection_post_layernorm", "norm_placement"),
            lambda after, placement: after and placement == "post",
            f"{{}} and {_NORMS}",
        ),
        Rule(
            ("qk_layernorm", "qk_layernorm_across_heads", "normalization", "apply_layernorm_1p"),
            lambda used, across, kind, less_1: used and across and (kind != "RMSNorm" or less_1),
            "{1} needs --normalization RMSNorm without --apply-layernorm-1p",
        ),
        *(one_of(*pair, message=_GAINS) for pair in _CONTRADICTING_GAINS),
        *(
            one_of(
                *("swiglu", gelu, "quick_geglu", "reglu", "liglu"),
                *("relu", "squared_relu", "xielu"),
                message=_ACTIVATIONS,
            )
            for gelu in ("geglu", "openai_gelu")  # these two go together
        ),
    )

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.is_gated:
            return max(int(8 * self.hidden_size / 3 / SWIGLU_MULTIPLE), 1) * SWIGLU_MULTIPLE
        return 4 * self.hidden_size

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return self.swiglu or self.geglu or self.quick_geglu or self.reglu or self.liglu

    @property
    def has_gelu(self) -> bool:
        """Whether the MLP's nonlinearity is GELU, in one of its two forms."""
        gates = (self.swiglu, self.quick_geglu, self.reglu, self.liglu)
        return not any((*gates, self.squared_relu, self.relu, self.xielu))

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether the linear layer behind attention has a bias."""
        return self.add_attention_output_bias or not self.disable_bias_linear

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the linear layers of the MLP, of experts and of their router have biases."""
        return self.add_mlp_bias or not self.disable_bias_linear

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that a query sees in each layer, its own included; None: all before it."""
        if self.window_size is None:
            return (None,) * self.num_layers
        window, text = parse_window(self.window_size), self.window_attn_skip_freq
        if text is None:
            return (window,) * self.num_layers
        marks = marks_of(text, self.num_layers, "--window-attn-skip-freq", nth=False)
        return tuple(window if mark else None for mark in marks)

    @property
    def score_scalar(self) -> float:
        """By whose root the products of queries and keys are divided."""
        return self.query_pre_attn_scalar or self.head_dim

    def _check_no_heads(self) -> None:
        """Raise InputError for what only attention with heads of queries and keys has."""
        for name in OF_HEADS:
            if getattr(self, name) and (self.qk_layernorm or not name.startswith("qk_")):
                raise InputError(
                    f"--multi-latent-attention and --{name.replace('_', '-')} contradict: latents "
                    "are normalized, not heads: leave the second out"
                )

    def check(self) -> None:
        """Raise InputError for settings that do not fit each other."""
        super().check()
        if self.multi_latent_attention:
            self._check_no_heads()
        assert len(self.windows) == len(self.layers_without_rope)  # or they raise


@dataclass(frozen=True, kw_only=True)
class ModelFlags(*declared("MODEL_FLAGS", CAPABILITIES), Section):
    """Megatron's switches that go with the value of another flag."""

    group_query_attention: bool = _switch(False)
    attention_head_type: str | None = _switch(None)
    glu_activation: str | None = _switch(None)
    no_position_embedding: bool = _switch(False)
