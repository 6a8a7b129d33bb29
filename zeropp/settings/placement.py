"""Where ranks keep their shards, as the plan of a model and the memory that it gets read it."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where ranks keep shards between their uses: "cpu", or None for the device that computes.

    weights: of all. trained: of trained ones until their optimizer is made. is_pinned: in
    page-locked memory. keys: those of `zero_optimization` that say so.
    """

    weights: str | None = None
    trained: str | None = None
    is_pinned: bool = False
    keys: tuple[str, ...] = ()


class Placed:
    """A configuration by which ranks keep shards where they compute with them.

    updates_copies: whether copies that nodes keep are brought up to date after a step.
    """

    placement: ClassVar[Placement] = Placement()
    updates_copies: ClassVar[bool] = False
