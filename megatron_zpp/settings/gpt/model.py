"""The GPT model: its shape and numerics, and how its weights are first drawn."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.settings.flag import NoEffect, Section, flag, ignored, needs
from megatron_zpp.settings.gpt.layer_pattern import MAX_LAYERS, marks_of, parse_window
from zeropp.errors import InputError

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "alibi", "none")
ROPE_TYPES = ("rope", "yarn")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
SWIGLU_MULTIPLE = 64
_NEEDS_ROPE = needs(
    "--position-embedding-type rope", lambda c: c.model.position_embedding_type == "rope"
)
_NEEDS_GELU = needs("an MLP with GELU", lambda c: not (c.model.swiglu or c.model.squared_relu))
_NEEDS_WINDOW = needs("--window-size", lambda c: c.model.window_size)
_NEEDS_QK_NORM = needs("--qk-layernorm", lambda c: c.model.qk_layernorm)
_NEEDS_YARN = needs("--rope-type yarn", lambda c: c.model.rope_type == "yarn")
_NEEDS_LONGROPE = needs("--longrope-long-factors", lambda c: c.model.longrope_long_factors)
_NEEDS_NO_BIAS = needs("--disable-bias-linear", lambda c: c.model.disable_bias_linear)
_NEEDS_ROPE_SCALING = needs("--use-rope-scaling", lambda c: c.model.use_rope_scaling)
_ALL_FP32 = NoEffect("everything is fp32", when=lambda c: c.precision.format == "float32")
_PRETRAINED = NoEffect(
    "the model in --pretrained-checkpoint says what it is",
    when=lambda c: c.lora.pretrained_checkpoint is not None,
)


def _flag(default: Any, help: str, *, no_effect: tuple[NoEffect, ...] = (), **facts: Any) -> Any:
    """A flag that has no effect on a model from --pretrained-checkpoint."""
    return flag(default, help, no_effect=(*no_effect, _PRETRAINED), **facts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The GPT model; sizes are in elements, derived values are properties."""

    num_layers: int = _flag(4, "transformer blocks", minimum=1, aliases=("encoder-num-layers",))
    hidden_size: int = _flag(256, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = _flag(
        None, "width inside the MLP (default 4h; with a gate int(8h/3/64)*64)", minimum=1
    )
    num_attention_heads: int = _flag(4, "query heads", minimum=1)
    kv_channels: int | None = _flag(
        None, "width of one head (default hidden-size / heads)", minimum=1
    )
    num_query_groups: int | None = _flag(
        None,
        "key-value heads of grouped-query attention (default: one per query head)",
        minimum=1,
        aliases=("num-key-value-heads",),
    )
    seq_length: int = flag(
        256, "tokens of a training sample", minimum=1, aliases=("encoder-seq-length",)
    )
    max_position_embeddings: int | None = _flag(
        None, "longest sequence the positions reach (default: seq-length)", minimum=1
    )
    make_vocab_size_divisible_by: int = _flag(
        128,
        "the vocabulary is padded to a multiple of this",
        minimum=1,
        shorthands={"no-pad-vocab-size": 1, "disable-pad-vocab-size": 1},
    )
    init_method_std: float = _flag(0.02, "standard deviation of the initial weights", minimum=0)
    hidden_dropout: float = _flag(
        0.1, "dropout after embedding, attention and MLP", minimum=0, maximum=1
    )
    attention_dropout: float = _flag(0.1, "dropout of attention weights", minimum=0, maximum=1)
    layernorm_epsilon: float = _flag(
        1e-5, "added to the variance in normalization", above=0, aliases=("norm-epsilon",)
    )
    normalization: str = _flag("LayerNorm", "kind of normalization", choices=NORMALIZATIONS)
    position_embedding_type: str = _flag(
        "learned_absolute",
        "how positions enter",
        choices=POSITION_EMBEDDINGS,
        shorthands={"use-rotary-position-embeddings": "rope"},
    )
    rotary_percent: float = _flag(
        1.0,
        "share of a head's channels that rotary positions turn",
        above=0,
        maximum=1,
        no_effect=(_NEEDS_ROPE,),
    )
    rotary_base: int = _flag(
        10000,
        "base of the rotary frequencies",
        minimum=1,
        aliases=("rotary-position-embeddings-theta",),
        no_effect=(_NEEDS_ROPE,),
    )
    use_rope_scaling: bool = _flag(
        False,
        "rotary frequencies of Llama 3.1: slow ones slower, for contexts beyond 8192 tokens",
        no_effect=(_NEEDS_ROPE,),
    )
    rope_scaling_factor: float = _flag(
        8.0,
        "by how much --use-rope-scaling slows the slow frequencies",
        minimum=1,
        no_effect=(_NEEDS_ROPE_SCALING,),
    )
    rotary_seq_len_interpolation_factor: int = _flag(
        1, "positions are divided by this before they are turned", minimum=1,
        no_effect=(_NEEDS_ROPE,),
    )  # fmt: skip
    rotary_base_local: int | None = _flag(
        None,
        "base of the rotary frequencies, not scaled, in layers with a window (default: as others)",
        minimum=1,
        no_effect=(_NEEDS_ROPE, _NEEDS_WINDOW),
    )
    no_rope_freq: str | None = _flag(
        None,
        "layers without rotary positions: every N-th, or a list with a 1 for each, as [0,0,0,1]*8",
        no_effect=(_NEEDS_ROPE,),
    )
    rope_type: str = _flag(
        "rope",
        "kind of rotary positions; yarn slows slow frequencies for longer texts",
        choices=ROPE_TYPES,
        no_effect=(_NEEDS_ROPE,),
    )
    rotary_scaling_factor: float = _flag(
        1.0,
        "YaRN: how many times longer than the first training's the texts are",
        minimum=1,
        no_effect=(_NEEDS_ROPE, _NEEDS_YARN),
    )
    yarn_original_max_position_embeddings: int = _flag(
        4096, "YaRN: tokens of the texts of the first training", minimum=1,
        no_effect=(_NEEDS_ROPE, _NEEDS_YARN),
    )  # fmt: skip
    yarn_beta_fast: float = _flag(
        32.0, "YaRN: frequencies with more turns in a text of the first training stay", above=0,
        no_effect=(_NEEDS_ROPE, _NEEDS_YARN),
    )  # fmt: skip
    yarn_beta_slow: float = _flag(
        1.0, "YaRN: frequencies with fewer turns are divided by --rotary-scaling-factor", above=0,
        no_effect=(_NEEDS_ROPE, _NEEDS_YARN),
    )  # fmt: skip
    yarn_attention_factor: float = _flag(
        1.0, "what YaRN multiplies queries and keys by", above=0,
        no_effect=(_NEEDS_ROPE, _NEEDS_YARN),
    )  # fmt: skip
    longrope_short_factors: tuple[float, ...] | None = _flag(
        None,
        "LongRoPE: what the rotary frequencies are divided by, one number each",
        above=0,
        no_effect=(_NEEDS_ROPE, _NEEDS_LONGROPE),
    )
    longrope_long_factors: tuple[float, ...] | None = _flag(
        None,
        "LongRoPE: the same for texts that are longer than the first training's",
        above=0,
        no_effect=(_NEEDS_ROPE,),
    )
    longrope_original_positions: int = _flag(
        4096, "tokens of the texts of the first training", minimum=1,
        no_effect=(_NEEDS_ROPE, _NEEDS_LONGROPE),
    )  # fmt: skip
    longrope_attention_factor: float = _flag(
        1.0, "what LongRoPE multiplies queries and keys by", above=0,
        no_effect=(_NEEDS_ROPE, _NEEDS_LONGROPE),
    )  # fmt: skip
    window_size: str | None = _flag(
        None, "LEFT,RIGHT: tokens that a token sees before and after it; after it is 0"
    )
    window_attn_skip_freq: str | None = _flag(
        None,
        "layers that see all tokens: every N-th, or a list with a 0 for each, as [1,1,0]*8",
        no_effect=(_NEEDS_WINDOW,),
    )
    query_pre_attn_scalar: float | None = _flag(
        None, "scores are divided by the root of this (default: the width of a head)", above=0
    )
    attn_logit_softcapping: float | None = _flag(
        None, "scores x become c tanh(x / c) for this c", above=0
    )
    final_logit_softcapping: float | None = _flag(
        None, "logits x become c tanh(x / c) for this c", above=0
    )
    scale_embeddings: bool = _flag(False, "multiply embeddings by the root of --hidden-size")
    embed_layernorm: bool = _flag(False, "normalize embeddings before the first block")
    apply_layernorm_1p: bool = _flag(
        False, "normalizations store their gains minus 1, as LayerNorm1P does"
    )
    norm_placement: str = _flag(
        "pre",
        "normalize what enters attention and MLP (pre), what leaves them (post), both (sandwich)",
        choices=NORM_PLACEMENTS,
    )
    use_parallel_residual: bool = _flag(
        False, "attention and MLP both start from the block's input, and their sum is added to it"
    )
    swiglu: bool = _flag(False, "gated SiLU in the MLP")
    geglu: bool = _flag(False, "gated GELU in the MLP")
    openai_gelu: bool = _flag(False, "GELU as OpenAI wrote it (the tanh form, written out)")
    squared_relu: bool = _flag(False, "squared ReLU in the MLP")
    bias_gelu_fusion: bool = _flag(
        True,
        "the exact (erf) GELU instead of its tanh form",
        shorthands={"no-bias-gelu-fusion": False},
        no_effect=(_NEEDS_GELU,),
    )
    untie_embeddings_and_output_weights: bool = _flag(False, "an output layer of its own")
    disable_bias_linear: bool = _flag(False, "linear layers without bias")
    add_qkv_bias: bool = _flag(
        False,
        "a bias of queries, keys and values, though the other linear layers have none",
        no_effect=(_NEEDS_NO_BIAS,),
    )
    qk_layernorm: bool = _flag(
        False, "normalize queries and keys, each head by itself, before their scores"
    )
    qk_layernorm_across_heads: bool = _flag(
        False,
        "with --qk-layernorm: normalize all heads of the queries, and of the keys, at once",
        no_effect=(_NEEDS_QK_NORM,),
    )
    apply_residual_connection_post_layernorm: bool = _flag(
        False, "the residual branches off after the normalization instead of before it"
    )
    apply_query_key_layer_scaling: bool = ignored(
        False,
        "the factor cancels, and scores are accumulated in fp32 here",
        shorthands={"no-query-key-layer-scaling": False},
    )
    attention_softmax_in_fp32: bool = ignored(
        False, "the attention kernels always accumulate the softmax in fp32"
    )
    fp32_residual_connection: bool = _flag(
        False, "keep the residual stream in fp32", no_effect=(_ALL_FP32,)
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
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def num_positions(self) -> int:
        """Longest sequence that positions exist for."""
        return self.max_position_embeddings or self.seq_length

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate, a third matrix."""
        return self.swiglu or self.geglu

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
    def layers_without_rope(self) -> tuple[bool, ...]:
        """Whether a layer has no rotary positions though others may have them, for each layer."""
        if self.no_rope_freq is None:
            return (False,) * self.num_layers
        return marks_of(self.no_rope_freq, self.num_layers, "--no-rope-freq")

    @property
    def score_scalar(self) -> float:
        """By whose root the products of queries and keys are divided."""
        return self.query_pre_attn_scalar or self.head_dim

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rotary positions turn."""
        return int(self.head_dim * self.rotary_percent)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` rounded up to a multiple of `make_vocab_size_divisible_by`."""
        multiple = self.make_vocab_size_divisible_by
        return (vocab_size + multiple - 1) // multiple * multiple

    def check(self) -> None:
        """Raise InputError unless the sizes fit each other."""
        super().check()
        if self.num_layers > MAX_LAYERS:
            raise InputError(f"--num-layers {self.num_layers}: at most {MAX_LAYERS} are supported")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads "
                f"{self.num_attention_heads}: change one of them or give --kv-channels"
            )
        if self.num_attention_heads % self.kv_heads:
            raise InputError(
                f"--num-attention-heads {self.num_attention_heads} is not divisible by "
                f"--num-query-groups {self.num_query_groups}: each group needs as many heads"
            )
        if self.seq_length > self.num_positions:
            raise InputError(
                f"--seq-length {self.seq_length} is longer than --max-position-embeddings "
                f"{self.max_position_embeddings}: lower the first or raise the second"
            )
        assert len(self.windows) == len(self.layers_without_rope)  # or they raise
        self._check_activation()
        self._check_normalization()
        self._check_rotary_scaling()

    def _check_normalization(self) -> None:
        if self.apply_residual_connection_post_layernorm:
            for flag_text, contradicts in (
                ("--use-parallel-residual", self.use_parallel_residual),
                ("--norm-placement post", self.norm_placement == "post"),
            ):
                if contradicts:
                    raise InputError(
                        f"{flag_text} and --apply-residual-connection-post-layernorm contradict: "
                        "there is not one normalization that the residual could follow"
                    )
        across_heads = self.qk_layernorm and self.qk_layernorm_across_heads
        if across_heads and (self.normalization != "RMSNorm" or self.apply_layernorm_1p):
            raise InputError(
                "--qk-layernorm-across-heads needs --normalization RMSNorm without "
                "--apply-layernorm-1p"
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
            "--use-rope-scaling": self.use_rope_scaling,
            "--rope-type yarn": self.rope_type == "yarn",
            "--longrope-long-factors": any(counts.values()),
            "--rotary-seq-len-interpolation-factor": self.rotary_seq_len_interpolation_factor > 1,
        }
        used = [name for name, is_on in scalings.items() if is_on]
        if len(used) > 1:
            raise InputError(f"{' and '.join(used)} contradict: frequencies are scaled in one way")

    def _check_activation(self) -> None:
        activations = [
            "--" + name.replace("_", "-")
            for name in ("swiglu", "geglu" if self.geglu else "openai_gelu", "squared_relu")
            if getattr(self, name)
        ]
        if len(activations) > 1:
            raise InputError(f"{' and '.join(activations)} contradict: the MLP has one activation")
        if self.position_embedding_type == "rope" and self.rotary_channels % 2:
            raise InputError(
                f"rotary positions turn pairs of channels, but {self.head_dim} channels x "
                f"--rotary-percent {self.rotary_percent:g} is odd: change the head size or percent"
            )


@dataclass(frozen=True, kw_only=True)
class ModelFlags(Section):
    """Megatron's switches that go with the value of another flag."""

    group_query_attention: bool = flag(
        False, "key-value heads are shared: one for all unless --num-query-groups says more"
    )
    attention_head_type: str | None = flag(
        None,
        "multiquery: one key-value head for all; multihead: one for each query head",
        choices=("multihead", "multiquery"),
    )
    no_position_embedding: bool = flag(
        False,
        no_effect=NoEffect("--position-embedding-type rope or none, which it needs, says it"),
    )
