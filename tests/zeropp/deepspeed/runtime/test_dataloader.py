"""A loader that begins again at its end."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from zeropp.deepspeed.runtime.dataloader import RepeatingLoader


def test_it_begins_again_and_shuffles_anew():
    data = torch.arange(8)
    sampler = DistributedSampler(data, 2, 0)
    loader = RepeatingLoader(DataLoader(data, 2, sampler=sampler))
    rounds = [[next(loader).tolist() for _ in range(2)] for _ in range(3)]
    assert len(loader) == 2 and len({str(each) for each in rounds}) > 1
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in DataLoader(data, 2, sampler=sampler)])
    assert rounds == expected


def test_any_iterable_of_batches_and_none():
    assert [batch for batch, _ in zip(RepeatingLoader([1, 2]), range(5), strict=False)] == [
        1, 2, 1, 2, 1,
    ]  # fmt: skip
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
