"""Where ranks keep their shards, and as what, as a plan and the allocation of memory read it."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where ranks keep shards between their uses: "cpu", or None for the device that computes.

    weights: of all. trained: of trained ones until their optimizer is made. is_pinned: in
    page-locked memory. frozen_bits: of the codes as which frozen matrices are kept; None for
    numbers. keys: those of `zero_optimization` that say so.
    """

    weights: str | None = None
    trained: str | None = None
    is_pinned: bool = False
    frozen_bits: int | None = None
    keys: tuple[str, ...] = ()


class Placed:
    """A configuration by which ranks keep shards where they compute with them."""

    placement: ClassVar[Placement] = Placement()
