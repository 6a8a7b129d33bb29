"""How large the GPT is."""

from dataclasses import dataclass
from typing import Any

from megatron_zpp.settings.flag import NoEffect, Section, flag
from megatron_zpp.settings.gpt.layer_pattern import MAX_LAYERS
from zeropp.errors import InputError
from zeropp.settings.schema import Rule, at_most

PRETRAINED = NoEffect(
    "the model in --pretrained-checkpoint says what it is",
    when=lambda c: c.pretrained_checkpoint is not None,
)
_OWN_WIDTHS = NoEffect(
    "heads of latent attention have --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim",
    when=lambda c: c.model.multi_latent_attention,
)


def model_flag(
    default: Any, help: str, *, no_effect: tuple[NoEffect, ...] = (), **facts: Any
) -> Any:
    """A flag that has no effect on a model from --pretrained-checkpoint."""
    return flag(default, help, no_effect=(*no_effect, PRETRAINED), **facts)


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Section):
    """Layers, widths, heads, lengths and the vocabulary's multiple."""

    num_layers: int = model_flag(
        4,
        "transformer blocks",
        minimum=1,
        maximum=MAX_LAYERS,
        aliases=("encoder-num-layers",),
    )
    hidden_size: int = model_flag(256, "width of the residual stream", minimum=1)
    ffn_hidden_size: int | None = model_flag(
        None, "width inside the MLP (default 4h; with a gate int(8h/3/64)*64)", minimum=1
    )
    num_attention_heads: int = model_flag(4, "query heads", minimum=1)
    kv_channels: int | None = model_flag(
        None,
        "width of one head (default hidden-size / heads)",
        minimum=1,
        no_effect=(_OWN_WIDTHS,),
    )
    num_query_groups: int | None = model_flag(
        None,
        "key-value heads of grouped-query attention (default: one per query head)",
        minimum=1,
        aliases=("num-key-value-heads",),
    )
    seq_length: int = flag(
        256, "tokens of a training sample", minimum=1, aliases=("encoder-seq-length",)
    )
    max_position_embeddings: int | None = model_flag(
        None, "longest sequence that positions are defined for (default: seq-length)", minimum=1
    )
    make_vocab_size_divisible_by: int = model_flag(
        128,
        "the vocabulary is padded to a multiple of this",
        minimum=1,
        shorthands={"no-pad-vocab-size": 1, "disable-pad-vocab-size": 1},
    )
    pad_vocab_size_to: int | None = model_flag(
        None, "rows of the padded vocabulary", minimum=1, aliases=("padded-vocab-size",)
    )

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
