"""Settings of ZeRO that a plan compares: rows of `zero_settings.toml`, and those of the flags."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from megatron_zpp.planner.replicas import INTERVAL
from zeropp import ZeroConfig
from zeropp.settings import read_toml
from zeropp.wire import Nodes


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """Settings of ZeRO: keys of the JSON's `zero_optimization` and `zeropp`.

    inexactness: 0 for what computes as unquantized training does, larger for fewer bits.
    """

    name: str
    inexactness: int
    zero: Mapping[str, Any]
    zeropp: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any], hpz: int) -> "ZeroSettings":
        """Return those of a row of the table; `hpz` is the size of hpZ's partition, or 1."""
        zero: dict[str, Any] = {"stage": row["stage"]}
        if row.get("hpz") and hpz > 1:
            zero["zero_hpz_partition_size"] = hpz
        zero |= dict.fromkeys(row.get("zero", ()), True)
        zeropp = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.get("zeropp", {}).items()
        }
        return cls(name=row["name"], inexactness=row["inexactness"], zero=zero, zeropp=zeropp)

    @classmethod
    def given(cls, zero: ZeroConfig) -> "ZeroSettings":
        """Return those that the flags and the JSON ask for."""
        optimization = zero.zero_optimization
        parts = [f"stage {zero.stage} as given"]
        parts += ["qwZ"] * optimization.zero_quantized_weights
        parts += ["hpZ"] * (optimization.zero_hpz_partition_size > 1)
        parts += ["qgZ"] * optimization.zero_quantized_gradients
        parts += ["MixZ++"] * (zero.placement.frozen_bits is not None)
        inexactness = (
            optimization.zero_quantized_weights + 2 * optimization.zero_quantized_gradients
        )
        return cls(name=", ".join(parts), inexactness=inexactness, zero={})

    def every(self, interval: int) -> "ZeroSettings":
        """Return these settings for replicas that exchange every `interval` steps."""
        return replace(self, zeropp={**self.zeropp, INTERVAL: interval})

    def to_json(self) -> dict[str, Any]:
        """Return the part of a DeepSpeed JSON that asks for these settings."""
        keys = {"zero_optimization": dict(self.zero)}
        return keys | ({"zeropp": dict(self.zeropp)} if self.zeropp else {})


def compared_settings(
    nodes: Nodes, *, is_divided: bool = False, has_adapters: bool = False
) -> list[ZeroSettings]:
    """Return the settings that are compared on a data axis of these nodes.

    is_divided: ranks split the model beside it. has_adapters: all other weights are frozen.
    """
    size = nodes.ranks_per_node * nodes.parts
    num_ranks, has_hops = nodes.count * size, nodes.count > 1 and size > 1
    if has_adapters:
        is_divided = False
    alone = is_divided and nodes.num_ranks == 1

    def is_offered(row: Mapping[str, Any]) -> bool:
        fits = num_ranks >= row.get("ranks", 1) and (has_hops or row.get("nodes", 1) == 1)
        if is_divided and not alone:
            return fits and nodes.count >= row.get("divided", math.inf)
        return fits and not (alone and row["stage"])

    rows = _table()["adapters" if has_adapters else "full"]
    return [ZeroSettings.of(row, size if has_hops else 1) for row in rows if is_offered(row)]


@cache
def _table() -> Mapping[str, Any]:
    return read_toml(__package__, "zero_settings.toml")
