"""The keys of MixZ++ in the JSON: frozen weights that are stored and gathered as codes."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from zeropp.settings.json_keys import JsonSection, key, needs
from zeropp.settings.placement import Placed, Placement
from zeropp.settings.schema import requires

NAME = "zero_quantized_nontrainable_weights"
_STORED = f"zero_optimization.{NAME}"


@dataclass(frozen=True, kw_only=True)
class StoredAsCodes(JsonSection):
    path: ClassVar[str] = "zero_optimization"

    zero_quantized_nontrainable_weights: bool = key(False)


@dataclass(frozen=True, kw_only=True)
class BitsOfCodes(JsonSection):
    """`nontrainable_weight_bits`: of frozen weights that are stored quantized."""

    path: ClassVar[str] = "zeropp"

    nontrainable_weight_bits: int = key(8, choices=(8, 4), no_effect=needs(_STORED))


class FrozenAsCodes(Placed, JsonSection):
    """What the configuration says of both keys."""

    @cached_property
    def placement(self) -> Placement:
        """Where and as what ranks keep their shards."""
        placed = super().placement
        if not self.zero_optimization.zero_quantized_nontrainable_weights:
            return placed
        bits = self.zeropp.nontrainable_weight_bits
        return replace(placed, frozen_bits=bits, keys=(*placed.keys, NAME))


KEYS = (StoredAsCodes, BitsOfCodes, FrozenAsCodes)
RULES = (
    requires(
        _STORED,
        "zero_optimization.stage",
        "{} and {}: stage 0 shards no weights; it needs stage 1, 2 or 3",
    ),
)
