"""`deepspeed.runtime.dataloader`: the data of an engine's steps."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeropp.deepspeed.names import attribute_of
from zeropp.settings.zero_config import BatchSizes


class RepeatingLoader:
    """An iterator over `loader` that begins again at its end.

    A sampler with `set_epoch` gets the number of each round, so that it shuffles anew. Raises
    StopIteration only for a loader without batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self._epoch = loader, 0
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Batches of one round."""
        return len(self.loader)

    def __next__(self) -> Any:
        for batch in self._batches:
            return batch
        self._epoch += 1
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)
        self._batches = iter(self.loader)
        return next(self._batches)


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


def build_loader(
    data: Dataset | None, collate_fn: Callable | None, batch: BatchSizes, mesh: DeviceMesh
) -> DataLoader | None:
    """Return a loader of this rank's full micro-batches, shuffled the same way on all ranks.

    Streams are not shuffled.
    """
    if data is None:
        return None
    sampler = None
    if isinstance(data, IterableDataset):
        data = SamplesOfRank(data, mesh.size(), mesh.get_local_rank())
    else:
        sampler = DistributedSampler(data, mesh.size(), mesh.get_local_rank(), drop_last=True)
    return DataLoader(
        data, batch.micro_samples, sampler=sampler, collate_fn=collate_fn, drop_last=True
    )


__getattr__ = attribute_of(__name__)
