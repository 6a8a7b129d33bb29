"""The GPT model: its shape and numerics, how its weights are first drawn, adapters beside them."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.settings.flag import NoEffect, Section, flag, ignored, needs
from zeropp.errors import InputError

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
SWIGLU_MULTIPLE = 64
_NEEDS_ROPE = needs(
    "--position-embedding-type rope", lambda c: c.model.position_embedding_type == "rope"
)
_NEEDS_ROPE_SCALING = needs("--use-rope-scaling", lambda c: c.model.use_rope_scaling)
_ALL_FP32 = NoEffect("everything is fp32", when=lambda c: c.precision.format == "float32")
_NEEDS_LORA = needs("--lora-rank", lambda c: c.lora.lora_rank)
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

    num_layers: int = _flag(4, "transformer blocks", minimum=1)
    hidden_size: int = _flag(256, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = _flag(
        None, "width inside the MLP (default 4h; with --swiglu int(8h/3/64)*64)", minimum=1
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
        128, "the vocabulary is padded to a multiple of this", minimum=1
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
    swiglu: bool = _flag(False, "gated SiLU in the MLP")
    openai_gelu: bool = _flag(False, "GELU as OpenAI wrote it (the tanh form, written out)")
    squared_relu: bool = _flag(False, "squared ReLU in the MLP")
    bias_gelu_fusion: bool = _flag(
        True,
        "the exact (erf) GELU instead of its tanh form",
        shorthands={"no-bias-gelu-fusion": False},
    )
    untie_embeddings_and_output_weights: bool = _flag(False, "an output layer of its own")
    disable_bias_linear: bool = _flag(False, "linear layers without bias")
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
        if self.swiglu:
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

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` rounded up to a multiple of `make_vocab_size_divisible_by`."""
        multiple = self.make_vocab_size_divisible_by
        return (vocab_size + multiple - 1) // multiple * multiple

    def check(self) -> None:
        """Raise InputError unless the sizes fit each other."""
        super().check()
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
        self._check_activation()

    def _check_activation(self) -> None:
        activations = [
            "--" + name.replace("_", "-")
            for name in ("swiglu", "openai_gelu", "squared_relu")
            if getattr(self, name)
        ]
        if len(activations) > 1:
            raise InputError(f"{' and '.join(activations)} contradict: the MLP has one activation")
        if self.position_embedding_type == "rope" and int(self.head_dim * self.rotary_percent) % 2:
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
    no_position_embedding: bool = flag(
        False, "no learned positions; needs --position-embedding-type rope or none"
    )


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters beside frozen weights, of a model that was trained before."""

    pretrained_checkpoint: str | None = flag(
        None, "model to start from: a folder of checkpoints, or a Hugging Face folder"
    )
    lora_rank: int = flag(0, "rank of LoRA's adapters; 0: all weights are trained", minimum=0)
    lora_alpha: float = flag(
        16.0, "adapters count alpha / rank times", above=0, no_effect=_NEEDS_LORA
    )
    lora_dropout: float = flag(
        0.0, "dropout before the adapters", minimum=0, maximum=1, no_effect=_NEEDS_LORA
    )
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "layers that get adapters (default: all of attention and MLP)"
    )

    @property
    def scaling(self) -> float:
        """What the adapters' product is multiplied by."""
        return self.lora_alpha / self.lora_rank

    def check(self) -> None:
        """Raise InputError for adapters of nothing, and for what needs them."""
        super().check()
        if self.lora_rank and self.pretrained_checkpoint is None:
            raise InputError(
                f"--lora-rank {self.lora_rank} freezes the model's weights: name the model that "
                "has them, --pretrained-checkpoint FOLDER"
            )
        if self.lora_target_modules and not self.lora_rank:
            raise InputError("--lora-target-modules needs --lora-rank above 0")
