"""Which positions of an axis share a node."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the data axis: each has `ranks_per_node` consecutive positions.

    `parts` is how many ranks of a node there are for each of these: more than 1 where other axes,
    as tensor parallelism, split the model among them. Nodes may be parts of one machine, which is
    then all of `machines`.
    """

    num_ranks: int
    ranks_per_node: int
    parts: int = 1
    machines: int = field(default=1, compare=False)

    @classmethod
    def of(cls, ranks: Sequence[int], ranks_per_node: int) -> "Nodes":
        """Build from the global ranks of the data axis, in order, with `ranks_per_node` to a node.

        Raises InputError if nodes would have different numbers of ranks, or are not contiguous.
        """
        runs = [(node, len(list(run))) for node, run in groupby(r // ranks_per_node for r in ranks)]
        sizes = [size for _, size in runs]
        if len({node for node, _ in runs}) < len(runs):
            raise InputError(
                f"the data axis visits a node twice: ranks {list(ranks)} with {ranks_per_node} "
                "ranks per node; order the mesh so that the ranks of a node follow each other"
            )
        if len(set(sizes)) > 1:
            raise InputError(
                f"zeropp.ranks_per_node = {ranks_per_node} does not divide the {len(ranks)} ranks: "
                f"the nodes would have {', '.join(map(str, sizes))} of them; give every node the "
                "same number, or set ranks_per_node to a divisor of the number of ranks"
            )
        return cls(num_ranks=len(ranks), ranks_per_node=sizes[0])

    @property
    def count(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def same(self, position: int, other: int) -> bool:
        """Whether two positions are on the same node."""
        return position // self.ranks_per_node == other // self.ranks_per_node
