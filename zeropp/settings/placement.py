"""Where ranks keep their shards, and as what, as a plan and the allocation of memory read it."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where ranks keep shards between their uses: "cpu", or None for the device that computes.

    weights: of all. trained_on_cpu: of trained ones, the part of their elements that is there when
    they get their values, as whole parameters. is_pinned: in page-locked memory. frozen_bits: of
    the codes as which frozen matrices are kept; None for numbers. keys: those of
    `zero_optimization` that say so.
    """

    weights: str | None = None
    trained_on_cpu: float = 0.0
    is_pinned: bool = False
    frozen_bits: int | None = None
    keys: tuple[str, ...] = ()


class Placed:
    """A configuration by which ranks keep shards where they compute with them.

    updates_copies: whether copies that nodes keep are brought up to date after a step.
    """

    placement: ClassVar[Placement] = Placement()
    updates_copies: ClassVar[bool] = False
