"""The shape and the numerics of the GPT model, and how its weights are first drawn."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag
from zeropp.errors import InputError

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
SWIGLU_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The GPT model; sizes are in elements, and what follows from the fields are properties."""

    num_layers: int = flag(4, "transformer blocks", minimum=1)
    hidden_size: int = flag(256, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = flag(
        None,
        "width inside the MLP (default 4h; with --swiglu int(8h/3/64)*64)",
        kind=int,
        minimum=1,
    )
    num_attention_heads: int = flag(4, "query heads", minimum=1)
    kv_channels: int | None = flag(
        None, "width of one head (default hidden-size / heads)", kind=int, minimum=1
    )
    num_query_groups: int | None = flag(
        None,
        "key-value heads of grouped-query attention (default: one per query head)",
        kind=int,
        minimum=1,
        names=("num-key-value-heads",),
    )
    seq_length: int = flag(
        256, "tokens of a training sample", minimum=1, names=("encoder-seq-length",)
    )
    max_position_embeddings: int | None = flag(
        None, "longest sequence the positions reach (default: seq-length)", kind=int, minimum=1
    )
    make_vocab_size_divisible_by: int = flag(
        128, "the vocabulary is padded to a multiple of this", minimum=1
    )
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", minimum=0)
    hidden_dropout: float = flag(
        0.1, "dropout after embedding, attention and MLP", minimum=0, maximum=1
    )
    attention_dropout: float = flag(0.1, "dropout of attention weights", minimum=0, maximum=1)
    layernorm_epsilon: float = flag(
        1e-5, "added to the variance in normalization", above=0, names=("norm-epsilon",)
    )
    normalization: str = flag("LayerNorm", "kind of normalization", choices=NORMALIZATIONS)
    position_embedding_type: str = flag(
        "learned_absolute", "how positions enter", choices=POSITION_EMBEDDINGS
    )
    rotary_percent: float = flag(
        1.0, "share of a head's channels that rotary positions turn", above=0, maximum=1
    )
    rotary_base: int = flag(
        10000,
        "base of the rotary frequencies",
        minimum=1,
        names=("rotary-position-embeddings-theta",),
    )
    use_rope_scaling: bool = flag(
        False, "rotary frequencies of Llama 3.1: slow ones slower, for contexts beyond 8192 tokens"
    )
    rope_scaling_factor: float = flag(
        8.0, "by how much --use-rope-scaling slows the slow frequencies", minimum=1
    )
    swiglu: bool = flag(False, "gated SiLU in the MLP")
    openai_gelu: bool = flag(False, "GELU as OpenAI wrote it (the tanh form, written out)")
    squared_relu: bool = flag(False, "squared ReLU in the MLP")
    bias_gelu_fusion: bool = flag(
        True, "the exact (erf) GELU instead of its tanh form", off=("no-bias-gelu-fusion",)
    )
    untie_embeddings_and_output_weights: bool = flag(False, "an output layer of its own")
    disable_bias_linear: bool = flag(False, "linear layers without bias")
    apply_residual_connection_post_layernorm: bool = flag(
        False, "the residual branches off after the normalization instead of before it"
    )
    apply_query_key_layer_scaling: bool = flag(
        False,
        "divide attention scores by the layer's number and multiply them back in the softmax",
        off=("no-query-key-layer-scaling",),
        no_effect="the factor cancels, and scores are accumulated in fp32 here",
    )
    attention_softmax_in_fp32: bool = flag(
        False,
        "softmax of the attention in fp32",
        no_effect="the attention kernels always accumulate the softmax in fp32",
    )
    fp32_residual_connection: bool = flag(False, "keep the residual stream in fp32")

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
        chosen = [
            "--" + name.replace("_", "-")
            for name in ("swiglu", "openai_gelu", "squared_relu")
            if getattr(self, name)
        ]
        if len(chosen) > 1:
            raise InputError(f"{' and '.join(chosen)} contradict: the MLP has one activation")
        if self.position_embedding_type == "rope" and int(self.head_dim * self.rotary_percent) % 2:
            raise InputError(
                f"rotary positions turn pairs of channels, but {self.head_dim} channels x "
                f"--rotary-percent {self.rotary_percent:g} is odd: change the head size or percent"
            )
