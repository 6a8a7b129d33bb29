"""This rank's samples of a stream that has no length and no random access."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset


class SamplesOfRank(IterableDataset):
    """Every `ranks`-th sample of `samples`, from the `rank`-th on; all ranks get as many.

    `samples` must yield the same on every rank, which reads all of them. The last samples are left
    out where there are not enough for every rank.
    """

    def __init__(self, samples: IterableDataset, ranks: int, rank: int) -> None:
        self.samples, self.ranks, self.rank = samples, ranks, rank

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.samples)
        while len(of_ranks := list(islice(samples, self.ranks))) == self.ranks:
            yield of_ranks[self.rank]

    def __len__(self) -> int:
        """Number of samples of this rank; TypeError where `samples` has no length."""
        return len(self.samples) // self.ranks
