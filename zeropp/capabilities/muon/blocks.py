"""Which rows of which matrices are orthogonalized together, and by whom: a plan, without effects.

The ranks of a data axis hold the rows of a matrix in order. A group of consecutive ones, those of a
node, orthogonalizes the rows that it has, each part of the matrix by itself. Such a block goes to
one rank of the group, its owner, and comes back. All ranks of a group make the same plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from zeropp.capabilities.muon.newton_schulz import flops
from zeropp.capabilities.muon.settings import NODE, RANK, WHOLE
from zeropp.wire.rank_group import RankGroup

Run = tuple[int, int]  # rows from the first to before the second
Shape = tuple[int, int]
BUCKET = 2**22  # elements that are on their way at a time


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """Rows of a matrix that are orthogonalized by themselves, as those of all queries.

    runs: where they are, in order, of the rows that the ranks of a data axis hold together.
    shape: of the whole part, which may be split over other axes too; updates are scaled by it.
    peer_runs: `runs` of each rank of such an axis, if they differ and the part is orthogonalized
    as a whole.
    """

    runs: tuple[Run, ...]
    shape: Shape
    peer_runs: tuple[tuple[Run, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix as the ranks of a data axis hold it together; all its rows are in parts.

    Of a stack of matrices [E, m, n] each one is a part.

    is_apart: parts of it that ranks of other axes hold are never orthogonalized with these.
    """

    shape: Shape
    parts: tuple[MatrixPart, ...]
    is_apart: bool = False

    @classmethod
    def of(cls, shape: Shape, whole: Shape | None = None) -> "Matrix":
        """Return a matrix of one part, which is scaled as one of the shape `whole`."""
        part = MatrixPart(runs=((0, shape[0]),), shape=whole or shape)
        return cls(shape=shape, parts=(part,))


@dataclass(frozen=True, kw_only=True)
class MatrixBlock:
    """Rows of a part that are orthogonalized together by the member `owner` of a group.

    matrix: its index. runs: for each member, the rows of its shard. whole: the part's shape.
    peer_rows: how many rows the ranks of another axis have of it, if their numbers differ.
    """

    matrix: int
    columns: int
    whole: Shape
    runs: tuple[tuple[Run, ...], ...]
    peer_rows: tuple[int, ...] = ()
    owner: int = 0

    def num_rows(self, member: int) -> int:
        """Return how many of the rows a member of the group holds."""
        return num_rows(self.runs[member])

    @cached_property
    def rows(self) -> int:
        return sum(map(self.num_rows, range(len(self.runs))))

    @property
    def elements(self) -> int:
        """How many there are on the rank, of those with parts of the block, that has most."""
        return max(self.peer_rows, default=self.rows) * self.columns

    @property
    def work(self) -> int:
        """The operations of five iterations, as many on each of these ranks."""
        return flops(max(self.peer_rows, default=self.rows), self.columns)

    def size(self, member: int) -> int:
        """Return how many elements a member of the group holds."""
        return self.num_rows(member) * self.columns


Round = tuple[MatrixBlock, ...]  # what is on its way at a time


def group_of(axis: RankGroup, blocks: str) -> RankGroup:
    """Return the ranks of a data axis whose rows are orthogonalized together, as `blocks` says."""
    sizes = {NODE: axis.nodes.ranks_per_node, RANK: 1, WHOLE: axis.size}
    return axis.consecutive(sizes[blocks])


def rounds_of(axis: RankGroup, matrices: Sequence[Matrix], blocks: str) -> tuple[Round, ...]:
    """Return which blocks of these matrices go to which member of the group, in turn."""
    return _rounds(tuple(matrices), axis.size, group_of(axis, blocks).members)


@lru_cache(64)  # without gradients of some matrices the plan is another
def _rounds(
    matrices: tuple[Matrix, ...], num_shards: int, members: tuple[int, ...]
) -> tuple[Round, ...]:
    return plan_rounds(matrices, num_shards, range(members[0], members[-1] + 1))


def plan_rounds(
    matrices: Sequence[Matrix], num_shards: int, members: range, bucket: int = BUCKET
) -> tuple[Round, ...]:
    """Return the blocks of the rows that `members` of `num_shards` ranks hold, dealt out to them.

    Each block in turn, the largest first, goes to the member with the least work so far. A round
    has at most `bucket` elements, and at least one block for each member while there are blocks.
    """
    blocks = [
        block
        for index, matrix in enumerate(matrices)
        for block in _blocks(index, matrix, num_shards, members)
    ]
    # Peers take the same blocks in the same order, whatever rows of them they have.
    blocks.sort(key=lambda block: (-block.work, block.matrix, block.peer_rows or block.runs))
    work = [0] * len(members)
    rounds: list[list[MatrixBlock]] = [[]]
    for block in blocks:
        owner = work.index(min(work))
        work[owner] += block.work
        taken = sum(each.elements for each in rounds[-1])
        if taken + block.elements > bucket and len(rounds[-1]) >= len(members):
            rounds.append([])
        rounds[-1].append(replace(block, owner=owner))
    return tuple(tuple(each) for each in rounds if each)


def shard_rows(rows: int, num_shards: int, position: int) -> Run:
    """Return the rows that FSDP2 gives the rank at `position`."""
    chunk = -(-rows // num_shards)
    return min(position * chunk, rows), min((position + 1) * chunk, rows)


def num_rows(runs: Sequence[Run]) -> int:
    """Return how many rows there are in runs."""
    return sum(stop - start for start, stop in runs)


def rows_within(runs: Sequence[Run], shard: Run) -> tuple[Run, ...]:
    """Return the parts of runs that are inside `shard`, counted from its first row."""
    first, end = shard
    cut = ((max(start, first), min(stop, end)) for start, stop in runs)
    return tuple((start - first, stop - first) for start, stop in cut if start < stop)


def _blocks(index: int, matrix: Matrix, num_shards: int, members: range) -> Iterator[MatrixBlock]:
    rows, columns = matrix.shape
    shards = [shard_rows(rows, num_shards, member) for member in members]
    for part in matrix.parts:
        runs, *of_peers = (
            tuple(rows_within(each, shard) for shard in shards)
            for each in (part.runs, *part.peer_runs)
        )
        peer_rows = tuple(sum(map(num_rows, each)) for each in of_peers)
        block = MatrixBlock(
            matrix=index, columns=columns, whole=part.shape, runs=runs, peer_rows=peer_rows
        )
        if block.elements:
            yield block
