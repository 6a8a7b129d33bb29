"""An `IterableDataset` as training_data: every rank has samples of its own, and as many."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of
from tests.zeropp.small_model import small_model
from zeropp.deepspeed.runtime.dataloader import SamplesOfRank


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return self.count


@ranks(2)
def test_ranks_share_the_samples_of_a_stream():
    loader = zeropp.initialize(
        model=small_model(), config=config_of(micro_batches=2), training_data=Stream(11)
    )[2]
    for _ in range(2):  # epochs
        batches = [batch.tolist() for batch in loader]
        assert batches == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])[dist.get_rank()]


def test_all_ranks_get_as_many_and_the_length_is_that_of_a_rank():
    of_ranks = [SamplesOfRank(StreamWithLength(11), 3, rank) for rank in range(3)]
    assert [list(samples) for samples in of_ranks] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [len(samples) for samples in of_ranks] == [3, 3, 3]
    loader = torch.utils.data.DataLoader(of_ranks[0], 2, drop_last=True)
    assert len(loader) == len(list(loader)) == 1
    with pytest.raises(TypeError, match="has no len"):
        len(SamplesOfRank(Stream(11), 3, 0))
