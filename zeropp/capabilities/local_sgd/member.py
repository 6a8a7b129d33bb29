"""The nodes that take part in something, the longest-serving one first."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Member:
    """A node: each launch has a `name` of its own, while `number` may be that of one that ended.

    is_fresh: it has no weights yet, and is to get those of another one.
    """

    name: str
    number: int
    is_fresh: bool = False


@dataclass(frozen=True)
class Members:
    """Nodes in the order in which they came, which is their places."""

    nodes: tuple[Member, ...]

    @classmethod
    def of_text(cls, text: str | bytes) -> "Members":
        """Read what `text` has returned."""
        return cls(tuple(Member(**each) for each in json.loads(text)))

    @property
    def text(self) -> str:
        """As text for the store."""
        return json.dumps([asdict(each) for each in self.nodes])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.nodes)

    @property
    def settled(self) -> "Members":
        """The same nodes, all with weights."""
        return Members(tuple(replace(each, is_fresh=False) for each in self.nodes))

    @property
    def with_weights(self) -> tuple[int, ...]:
        """The places of nodes that have weights."""
        return tuple(place for place, each in enumerate(self.nodes) if not each.is_fresh)

    def place(self, name: str) -> int | None:
        """Return the place of a node; None if it does not take part."""
        return self.names.index(name) if name in self.names else None

    def without(self, names: Iterable[str]) -> "Members":
        """Return the others than these."""
        gone = set(names)
        return Members(tuple(each for each in self.nodes if each.name not in gone))

    def __str__(self) -> str:
        numbers = [str(each.number) for each in self.nodes]
        return f"node{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
