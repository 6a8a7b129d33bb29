"""Batches: the order knows neither ranks nor restarts; masks and positions; errors in workers."""

import multiprocessing.connection
import os
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

EOD = 9


class Numbered:
    """Sample i holds the tokens 10 * i, 10 * i + 1 ... so that a batch tells where it is from."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index >= 1000:
            raise InputError(f"sample {index} is bad")
        return {"tokens": 10 * index + np.arange(4)}


class Signalled:
    """Each sample comes after the signals that Ctrl-C and a batch system send to every process."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        return {"tokens": index + np.arange(4)}


class Deadly:
    """The process that reads sample 20 is killed, as the system does when memory runs out."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"tokens": index + np.arange(4)}


class Fixed:
    def __init__(self, *samples: list[int]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": np.array(self.samples[index])}


def load(dataset, consumed=0, micro=2, place=(0, 1), **data) -> Loader:
    rank, world = place
    config = DataConfig(**{"num_workers": 0, **data})
    return Loader(
        dataset, config, consumed_samples=consumed, micro_batch_size=micro,
        rank=rank, world=world, eod=EOD,
    )  # fmt: skip


def numbers(batch: Batch) -> list[int]:
    return (batch.tokens[:, 0] // 10).tolist()


def order(size: int, consumed: int, micro: int, world: int, steps: int, kind: str) -> list[int]:
    """Sample numbers of `steps` micro-steps over all ranks."""
    loaders = [
        load(Numbered(size), consumed, micro, (rank, world), dataloader_type=kind)
        for rank in range(world)
    ]
    numbers_read = []
    for _ in range(steps):
        for loader in loaders:
            numbers_read += numbers(next(loader))
    return numbers_read


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 60),
    consumed=st.integers(0, 150),
    shape=st.sampled_from([(1, 12), (2, 6), (3, 4), (12, 1), (4, 1), (1, 6)]),
)
def test_cyclic_order_knows_no_ranks_and_no_restart(size, consumed, shape) -> None:
    micro, world = shape
    steps = 24 // (micro * world)
    whole = order(size, 0, 1, 1, consumed + 24, "cyclic")
    assert order(size, consumed, micro, world, steps, "cyclic") == whole[consumed:]
    epochs = [whole[i : i + size] for i in range(0, len(whole) - size + 1, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_each_cyclic_epoch_has_its_own_order() -> None:
    assert order(100, 13, 3, 2, 2, "single") == list(range(13, 25))  # the dataset's own order
    whole = order(50, 0, 1, 1, 150, "cyclic")
    assert len({tuple(whole[i : i + 50]) for i in (0, 50, 100)}) == 3
    expected = torch.randperm(50, generator=torch.Generator().manual_seed(1)).tolist()
    assert whole[50:100] == expected


def test_each_rank_takes_its_slice() -> None:
    slices = [
        [numbers(batch) for batch in islice(load(Numbered(20), 0, 2, (rank, 2)), 2)]
        for rank in (0, 1)
    ]
    assert slices == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_labels_masks_positions_and_edges_of_documents() -> None:
    samples = Fixed([1, 2, EOD, 4, 5, EOD, EOD, 1, 2], [EOD, 1, 2, 3, 4, 5, 6, EOD, 1])
    batch = next(load(samples))
    assert batch.tokens.tolist() == [sample[:-1] for sample in samples.samples]
    assert batch.labels.tolist() == [sample[1:] for sample in samples.samples]
    assert batch.loss_mask.tolist() == [[1.0] * 8] * 2 and batch.edges is None
    assert batch.position_ids.tolist() == [[*range(8)]] * 2
    kinds = [batch.tokens, batch.labels, batch.loss_mask, batch.position_ids]
    assert [tensor.dtype for tensor in kinds] == [torch.int64] * 2 + [torch.float32, torch.int64]
    apart = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
    batch = next(load(samples, **apart))
    # No loss where the input ends a document; what follows begins another one.
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert batch.edges.tolist() == [0, 3, 6, 7, 8, 9, 16] and batch.edges.dtype == torch.int32
    assert batch.inputs()[4] is batch.edges


def test_the_position_is_counted_and_the_end_is_named() -> None:
    loader = load(Numbered(10), consumed=4, micro=2, place=(0, 2))
    assert loader.consumed_samples == 4 and numbers(next(loader)) == [4, 5]
    assert loader.consumed_samples == 8
    with pytest.raises(InputError, match="8 of its 10 samples are consumed and 4 more are needed"):
        next(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_an_error_without_traceback(workers: int) -> None:
    loader = load(Numbered(2000), consumed=996, num_workers=workers)
    assert [numbers(next(loader)) for _ in range(2)] == [[996, 997], [998, 999]]
    with pytest.raises(InputError) as caught:
        next(loader)
    assert str(caught.value) == "sample 1000 is bad"
    loader.close()


def test_workers_keep_the_order_and_torchs_random_state() -> None:
    before = torch.get_rng_state()
    loader = load(Numbered(100), num_workers=2)
    assert [numbers(batch) for batch in islice(loader, 20)] == [[i, i + 1] for i in range(0, 40, 2)]
    loader.close()
    assert torch.equal(before, torch.get_rng_state())


def test_workers_leave_signals_to_the_rank_whose_wait_is_counted():
    loader = load(Signalled(), num_workers=2)
    assert loader.waited == 0
    assert [next(loader).tokens[0, 0].item() for _ in range(3)] == [0, 2, 4]
    assert loader.waited > 0
    loader.close()


def workers() -> list[multiprocessing.process.BaseProcess]:
    """Processes of this one that live, but for the ranks of tests that ran before."""
    return [
        process
        for process in multiprocessing.active_children()
        if not process.name.startswith("rank ")
    ]


def test_a_killed_worker_is_named_and_none_is_left() -> None:
    with pytest.raises(InputError, match=r"has died \(exit code -9\).* --num-workers 2"):
        with load(Deadly(), num_workers=2) as loader:
            list(islice(loader, 20))
    assert not workers()


def test_a_killed_worker_interrupts_the_rank_only_where_it_reads() -> None:
    with pytest.raises(InputError, match="has died"):
        with load(Numbered(1000), num_workers=2) as loader:
            next(loader)
            interrupted, worker = True, workers()[0]
            worker.kill()
            multiprocessing.connection.wait([worker.sentinel])  # a SIGCHLD comes in here
            interrupted = False
            list(islice(loader, 400))
    assert not interrupted and not workers()


def test_an_error_of_the_rank_leaves_no_worker() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with load(Numbered(100), num_workers=2) as loader:
            batches, loader._batches = loader._batches, iter(())  # what a traceback may hold on to
            next(batches)
            raise ZeroDivisionError
    assert caught.value and not workers()
