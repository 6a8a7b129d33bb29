"""The sequences of a pass, as the layers of a GPT see them."""

from dataclasses import dataclass

from torch import Tensor

from megatron_zpp.model.attention.cache import KeyValueCache
from megatron_zpp.model.attention.rotary import Rotary
from megatron_zpp.model.routing_record import RoutingRecord


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences that x belongs to in a pass: what layers know of its tokens.

    rotary: the tables of their positions, by their kind; empty if there are none. query_scale: what
    queries are multiplied by, [B or 1, S, 1, 1], None for 1. edges int32
    [n + 1]: where documents begin, to which attention is then limited. cache: earlier tokens, which
    x continues. is_split: each context rank has a part of the tokens. splits_rows: each tensor rank
    has some rows of x between the layers that are split (sequence parallelism). routing: what
    layers with experts decide and count; None where nothing is counted, as in evaluation.
    """

    rotary: tuple[Rotary | None, ...] = ()
    query_scale: Tensor | None = None
    edges: Tensor | None = None
    cache: KeyValueCache | None = None
    is_split: bool = False
    splits_rows: bool = False
    routing: RoutingRecord | None = None


WHOLE_ROWS = Sequences()
