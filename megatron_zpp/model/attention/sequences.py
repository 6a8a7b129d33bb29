"""The sequences of a pass, as the layers of a GPT see them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.rotary import Rotary


class PassRecord(Protocol):
    """What layers decide and count in the passes of a micro-batch, those of backward included."""

    def forget_tokens(self, layers: Iterable[int]) -> None:
        """Free what only passes through these layers need."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences that x belongs to in a pass: what layers know of its tokens.

    rotary: the tables of their positions, by their kind; empty if there are none. query_scale: what
    queries are multiplied by, [B or 1, S, 1, 1], None for 1. edges int32
    [n + 1]: where documents begin, to which attention is then limited. cache: earlier tokens, which
    x continues. is_split: each context rank has a part of the tokens. splits_rows: each tensor rank
    has some rows of x between the layers that are split (sequence parallelism). routing: what
    layers decide and count; None where nothing is counted, as in evaluation.
    """

    rotary: tuple[Rotary | None, ...] = ()
    query_scale: Tensor | None = None
    edges: Tensor | None = None
    cache: KeyValueCache | None = None
    is_split: bool = False
    splits_rows: bool = False
    routing: PassRecord | None = None


WHOLE_ROWS = Sequences()
