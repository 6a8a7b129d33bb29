"""The GPT model: its shape and numerics, and how its weights are first drawn."""

from dataclasses import dataclass
from functools import partial

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.flag import NoEffect, Section, flag, needs
from megatron_zpp.settings.gpt.layer_pattern import marks_of, parse_window
from megatron_zpp.settings.gpt.positions import NEEDS_ROPE, PositionConfig
from megatron_zpp.settings.gpt.sizes import PRETRAINED, model_flag
from zeropp.errors import InputError
from zeropp.settings.capabilities import declared
from zeropp.settings.schema import Rule, one_of, settings_of

OF_CAPABILITIES = tuple(declared("MODEL", CAPABILITIES))
# Of these, what only training uses: the run that saved a model may have another than one that loads
# it.
OF_TRAINING = tuple(
    entry.name
    for part in OF_CAPABILITIES
    for entry in settings_of(part)
    if PRETRAINED not in entry.no_effect
)
NORM_PLACEMENTS = ("pre", "post", "sandwich")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
SWIGLU_MULTIPLE = 64
OF_HEADS = (  # what latent attention does not have
    "qk_layernorm_across_heads",
    "qk_layernorm_per_head",
    "qk_layernorm_after_rope",
    "llama_4_scaling_beta",
)
_NEEDS_GELU = needs("an MLP with GELU", lambda c: c.model.has_gelu)
_NEEDS_GATE = needs("a gated MLP, such as --swiglu", lambda c: c.model.is_gated)
_NEEDS_WINDOW = needs("--window-size", lambda c: c.model.window_size)
_NEEDS_QK_NORM = needs("--qk-layernorm", lambda c: c.model.qk_layernorm)
_NEEDS_PARALLEL = needs("--use-parallel-residual", lambda c: c.model.use_parallel_residual)
_NEEDS_NORM_BIAS = needs(
    "--normalization LayerNorm without --disable-norm-gain",
    lambda c: c.model.normalization == "LayerNorm" and not c.model.disable_norm_gain,
)
_NEEDS_NO_BIAS = needs("--disable-bias-linear", lambda c: c.model.disable_bias_linear)
_qk_norm_flag = partial(model_flag, no_effect=(_NEEDS_QK_NORM,))
_bias_flag = partial(model_flag, no_effect=(_NEEDS_NO_BIAS,))
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
_ALL_FP32 = NoEffect("everything is fp32", when=lambda c: c.precision.format == "float32")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(*OF_CAPABILITIES, PositionConfig):
    """The GPT: its shape, its numerics and its initial weights."""

    init_method_std: float = model_flag(
        0.02, "standard deviation of the initial weights", minimum=0
    )
    hidden_dropout: float = model_flag(
        0.1, "dropout after embedding, attention and MLP", minimum=0, maximum=1
    )
    attention_dropout: float = model_flag(0.1, "dropout of attention weights", minimum=0, maximum=1)
    layernorm_epsilon: float = model_flag(
        1e-5, "added to the variance in normalization", above=0, aliases=("norm-epsilon",)
    )
    normalization: str = model_flag("LayerNorm", "kind of normalization", choices=NORMALIZATIONS)
    window_size: str | None = model_flag(
        None, "LEFT,RIGHT: tokens that a token sees before and after it; after it is 0"
    )
    window_attn_skip_freq: str | None = model_flag(
        None,
        "layers that see all tokens: every N-th, or a list with a 0 for each, as [1,1,0]*8",
        no_effect=(_NEEDS_WINDOW,),
    )
    query_pre_attn_scalar: float | None = model_flag(
        None, "scores are divided by the root of this (default: the width of a head)", above=0
    )
    attn_logit_softcapping: float | None = model_flag(
        None, "cap scores x softly: c tanh(x / c) for this c", above=0
    )
    softmax_type: str = model_flag(
        "vanilla",
        "attention sinks: one more score of each head in the softmax, which weighs no value: none "
        "(vanilla), 0 (off-by-one), trained (learnable)",
        choices=SOFTMAX_TYPES,
    )
    final_logit_softcapping: float | None = model_flag(
        None, "cap logits x softly: c tanh(x / c) for this c", above=0
    )
    embedding_multiplier: float = model_flag(
        1.0, "multiply embeddings by this, as Granite does", above=0
    )
    residual_multiplier: float = model_flag(
        1.0, "multiply what attention and MLP add to the residual stream by this", above=0
    )
    logits_scaling: float = model_flag(1.0, "divide logits by this", above=0)
    scale_embeddings: bool = model_flag(False, "multiply embeddings by the root of --hidden-size")
    embed_layernorm: bool = model_flag(False, "normalize embeddings before the first block")
    apply_layernorm_1p: bool = model_flag(
        False, "normalizations store their gains minus 1, as LayerNorm1P does"
    )
    disable_norm_bias: bool = model_flag(
        False, "LayerNorm without a bias, as Cohere's", no_effect=(_NEEDS_NORM_BIAS,)
    )
    disable_norm_gain: bool = model_flag(
        False, "normalizations without gain and bias, as OLMo's and nanochat's"
    )
    norm_placement: str = model_flag(
        "pre",
        "normalize what enters attention and MLP (pre), what leaves them (post), both (sandwich)",
        choices=NORM_PLACEMENTS,
    )
    use_parallel_residual: bool = model_flag(
        False, "attention and MLP both start from the block's input, and their sum is added to it"
    )
    parallel_residual_single_norm: bool = model_flag(
        False,
        "with --use-parallel-residual: one normalization for attention and MLP",
        no_effect=(_NEEDS_PARALLEL,),
    )
    swiglu: bool = model_flag(False, "gated SiLU in the MLP")
    geglu: bool = model_flag(False, "gated GELU in the MLP")
    quick_geglu: bool = model_flag(False, "gated x sigmoid(1.702 x) in the MLP")
    openai_gelu: bool = model_flag(False, "GELU as OpenAI wrote it (the tanh form, written out)")
    squared_relu: bool = model_flag(False, "squared ReLU in the MLP")
    relu: bool = model_flag(False, "ReLU in the MLP")
    reglu: bool = model_flag(False, "gated ReLU in the MLP")
    liglu: bool = model_flag(False, "product of two linear layers in the MLP (bilinear)")
    glu_linear_offset: float = model_flag(
        0.0, "add this to what the gate multiplies", no_effect=(_NEEDS_GATE,)
    )
    activation_func_clamp_value: float | None = model_flag(
        None,
        "clamp the gate to at most this before its nonlinearity, and what it multiplies to this "
        "on both sides of 0",
        above=0,
        no_effect=(_NEEDS_GATE,),
    )
    xielu: bool = model_flag(False, "xIELU in the MLP, with two learned numbers in each layer")
    bias_gelu_fusion: bool = model_flag(
        True,
        "the exact (erf) GELU instead of its tanh form",
        shorthands={"no-bias-gelu-fusion": False},
        no_effect=(_NEEDS_GELU,),
    )
    untie_embeddings_and_output_weights: bool = model_flag(False, "an output layer of its own")
    disable_bias_linear: bool = model_flag(False, "linear layers without bias")
    add_qkv_bias: bool = _bias_flag(
        False, "add a bias to queries, keys and values if the other linear layers have none"
    )
    add_attention_output_bias: bool = _bias_flag(
        False, "add a bias to the output layer of attention"
    )
    add_mlp_bias: bool = _bias_flag(
        False, "add a bias to the layers of the MLP, of experts and of their router"
    )
    qk_layernorm: bool = model_flag(
        False, "normalize queries and keys, each head by itself, before their scores"
    )
    qk_layernorm_across_heads: bool = _qk_norm_flag(
        False, "with --qk-layernorm: normalize all heads of the queries, and of the keys, at once"
    )
    qk_layernorm_per_head: bool = _qk_norm_flag(
        False, "with --qk-layernorm: each head has gains of its own, and there is no bias"
    )
    qk_layernorm_after_rope: bool = model_flag(
        False,
        "with --qk-layernorm: normalize queries and keys after rotary positions have turned them",
        no_effect=(_NEEDS_QK_NORM, NEEDS_ROPE),
    )
    apply_residual_connection_post_layernorm: bool = model_flag(
        False, "the residual branches off after the normalization instead of before it"
    )
    fp32_residual_connection: bool = model_flag(
        False, "keep the residual stream in fp32", no_effect=(_ALL_FP32,)
    )

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
class _ModelFlags(Section):
    group_query_attention: bool = flag(
        False, "key-value heads are shared: one for all unless --num-query-groups says more"
    )
    attention_head_type: str | None = flag(
        None,
        "multiquery: one key-value head for all; multihead: one for each query head",
        choices=("multihead", "multiquery"),
    )
    glu_activation: str | None = flag(
        None,
        "--swiglu, --geglu (exact), --reglu or --liglu, by default with an MLP of 4h",
        choices=("geglu", "liglu", "reglu", "swiglu"),
    )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(*declared("MODEL_FLAGS", CAPABILITIES), _ModelFlags):
    """Megatron's switches that go with the value of another flag."""

    no_position_embedding: bool = flag(
        False,
        "no learned positions; --position-embedding-type rope or none implies this",
        no_effect=NoEffect("--position-embedding-type rope or none, which it needs, implies it"),
    )
