"""How large the GPT is, and the widths of multi-head latent attention."""

from dataclasses import dataclass

from megatron_zpp.settings.flag import NoEffect, Section, flags_in
from megatron_zpp.settings.gpt.layer_pattern import MAX_LAYERS
from zeropp.errors import InputError
from zeropp.settings import Rule, at_most

PRETRAINED = NoEffect(
    "the model in --pretrained-checkpoint says what it is",
    when=lambda c: c.pretrained_checkpoint is not None,
)
_flag = flags_in(
    "gpt/sizes.toml",
    {
        "heads of latent attention have --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim": (
            lambda c: c.model.multi_latent_attention
        )
    },
    no_effect=(PRETRAINED,),
)


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Section):
    """Layers, widths, heads, lengths and the vocabulary's multiple."""

    num_layers: int = _flag(4, maximum=MAX_LAYERS)
    hidden_size: int = _flag(256)
    ffn_hidden_size: int | None = _flag(None)
    num_attention_heads: int = _flag(4)
    kv_channels: int | None = _flag(None)
    num_query_groups: int | None = _flag(None)
    seq_length: int = _flag(256, no_effect=())
    max_position_embeddings: int | None = _flag(None)
    make_vocab_size_divisible_by: int = _flag(128)
    pad_vocab_size_to: int | None = _flag(None)

    rules = (
        Rule(
            ("pad_vocab_size_to", "make_vocab_size_divisible_by"),
            lambda rows, multiple: rows is not None and rows % multiple,
            "{} is not a multiple of {}: change one of them",
        ),
        Rule(
            ("hidden_size", "num_attention_heads", "kv_channels"),
            lambda width, heads, channels: channels is None and width % heads,
            "{} is not divisible by {}: change one of them, or give --kv-channels",
        ),
        Rule(
            ("num_attention_heads", "num_query_groups"),
            lambda heads, groups: groups is not None and heads % groups,
            "{} is not divisible by {}: each group needs as many heads",
        ),
        at_most(
            "seq_length",
            "max_position_embeddings",
            "{} is longer than {}: lower the first or raise the second",
        ),
    )

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def num_positions(self) -> int:
        """Longest sequence that positions are defined for."""
        return self.max_position_embeddings or self.seq_length

    def padded_vocab_size(self, vocab_size: int) -> int:
        """`vocab_size` rounded up to a multiple of `make_vocab_size_divisible_by`.

        Raises InputError if `pad_vocab_size_to` is less.
        """
        if self.pad_vocab_size_to is not None and self.pad_vocab_size_to < vocab_size:
            raise InputError(
                f"--pad-vocab-size-to {self.pad_vocab_size_to} is less than the {vocab_size} "
                "entries of the tokenizer: give as many or more"
            )
        multiple = self.make_vocab_size_divisible_by
        return (vocab_size + multiple - 1) // multiple * multiple


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(SizeConfig):
    """Latent attention (DeepSeek-V2): keys and values are computed from one latent per token."""

    multi_latent_attention: bool = _flag(False)
    q_lora_rank: int | None = _flag(None)
    kv_lora_rank: int = _flag(32)
    qk_head_dim: int = _flag(128)
    qk_pos_emb_head_dim: int = _flag(64)
    v_head_dim: int = _flag(128)
