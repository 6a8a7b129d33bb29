"""Batches for one rank. The whole state is one integer, the number of samples consumed.

The samples of all ranks form one sequence. A micro-step takes the next `micro_batch_size * world`
of them and rank r takes the r-th slice, so neither the number of ranks nor a restart changes the
order. A larger global batch, as in a ramp-up, is more micro-steps.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ctypes import c_bool
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import connection
from types import TracebackType
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron_zpp.data.masks import document_edges, loss_mask, position_ids, shown
from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

ON_LINUX = sys.platform == "linux"
LAST_BREATH = 1.0  # seconds until the end of a process is seen after that of its connections


class Samples(Protocol):
    """A dataset: item i is dict(tokens int64 [S + 1]).

    With an attribute `hides_labels` that is true, complements (~id) are tokens that as labels have
    no loss, and an end of document so hidden ends none.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch [b, S]: tokens, labels, position_ids int64; loss_mask float32 of 0 and 1.

    `edges` int32 [n + 1]: where documents begin, if attention is to stop there; else None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    edges: torch.Tensor | None = None

    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """What `GPT.forward` takes, in its order."""
        return self.tokens, self.labels, self.loss_mask, self.position_ids, self.edges


class Loader:
    """Endless `Batch`es of one rank's slices, read ahead by `data.num_workers` processes.

    A process hands over one tensor, the text [b, S + 1], in page-locked memory where `device` is a
    GPU; all that follows from it is made on the device, and nothing waits for the copy.

    `consumed_samples` counts the samples of all ranks, those before the start included; `waited`
    the seconds that `next` took so far. `eod` is the id that ends a document. `next` raises
    InputError when a `single` dataset is used up, and for what is wrong with a sample. A context
    manager: at its end no worker is left, and the death of one is an InputError.
    """

    def __init__(
        self,
        dataset: Samples,
        data: DataConfig,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        rank: int,
        world: int,
        eod: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.consumed_samples, self._length, self.waited = consumed_samples, len(dataset), 0.0
        self._closing = multiprocessing.RawValue(c_bool)
        self._step, self._data, self._eod = micro_batch_size * world, data, eod
        self._device = torch.device(device)
        self._hides_labels = getattr(dataset, "hides_labels", False)
        order = _cyclic if data.dataloader_type == "cyclic" else _single
        samples = order(self._length, consumed_samples, self._step)
        slices = _RankSlices(samples, rank, micro_batch_size)
        loader = DataLoader(
            _Checked(dataset),
            batch_sampler=slices,
            num_workers=data.num_workers,
            # A fork shares the mapped indices; elsewhere than on Linux it is not safe.
            multiprocessing_context="fork" if data.num_workers and ON_LINUX else None,
            collate_fn=_Collate(eod if data.reset_attention_mask else None),
            worker_init_fn=partial(_leave_signals, self._closing),
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # its own, or torch's would move on and change dropout
        )
        others = multiprocessing.active_children()
        self._batches = iter(loader)
        self._workers = [each for each in multiprocessing.active_children() if each not in others]

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Noticed by SIGCHLD, or while a tensor is fetched from it: with which error is chance.
        lost = self._lost_worker() if isinstance(error, (RuntimeError, OSError, EOFError)) else None
        self.close()
        if lost is not None:
            raise InputError(
                f"a process that reads samples ahead has died (exit code {lost}); the system may "
                f"have killed it for want of memory: give fewer than --num-workers "
                f"{self._data.num_workers}, or 0, with which the rank reads for itself"
            ) from error

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        read = next(self._batches, None)
        self.waited += time.perf_counter() - started
        if read is None:
            raise InputError(
                f"the data is used up: {self.consumed_samples} of its {self._length} samples are "
                f"consumed and {self._step} more are needed; give more data, train for less, or "
                "repeat it with --dataloader-type cyclic"
            )
        if isinstance(read, InputError):
            raise read
        self.consumed_samples += self._step
        return self._batch(*read)

    def close(self) -> None:
        """End the worker processes."""
        self._closing.value = True
        self._batches = iter(())  # DataLoader ends its workers, unless an error still refers to it
        for worker in self._workers:
            worker.terminate()
            worker.join()
        self._workers = []

    def _batch(self, text: torch.Tensor, edges: torch.Tensor | None) -> Batch:
        """What follows from the text [b, S + 1]: labels, loss mask, positions."""
        text = text.to(self._device, non_blocking=True)
        ids = shown(text) if self._hides_labels else text
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        mask = loss_mask(tokens, self._eod, self._data.eod_mask_loss)
        if self._hides_labels:
            mask *= text[:, 1:] >= 0
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=mask,
            position_ids=position_ids(text[:, :-1], self._eod, self._data.reset_position_ids),
            edges=None if edges is None else edges.to(self._device, non_blocking=True),
        )

    def _lost_worker(self) -> int | None:
        """The exit code of a worker that failed (minus the signal that killed it), if any has."""
        with suppress(RuntimeError):  # raised by torch's handler of SIGCHLD when one ends just now
            ended = connection.wait([worker.sentinel for worker in self._workers], LAST_BREATH)
            for worker in self._workers:
                if worker.sentinel in ended:
                    worker.join()
        return next((worker.exitcode for worker in self._workers if worker.exitcode), None)


def _leave_signals(closing: c_bool, worker: int) -> None:
    """A signal to all processes of a job is the rank's affair: it ends its workers, or saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Status 0, or torch's handler of SIGCHLD would report a failure.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if closing.value else None)


class _RankSlices:
    """Of each micro-step's sample numbers the slice of one rank; what DataLoader draws from."""

    def __init__(self, steps: Iterator[list[int]], rank: int, micro_batch_size: int) -> None:
        self._steps = steps
        self._slice = slice(rank * micro_batch_size, (rank + 1) * micro_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return (step[self._slice] for step in self._steps)


def _single(length: int, consumed: int, step: int) -> Iterator[list[int]]:
    """Samples in the order of the dataset; the last incomplete step is left out."""
    for start in range(consumed, length - step + 1, step):
        yield list(range(start, start + step))


def _cyclic(length: int, consumed: int, step: int) -> Iterator[list[int]]:
    """Samples in an order that is drawn anew for each epoch, seeded by its number."""
    assert length > 0
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for start in count(consumed, step):
        numbers = []
        while len(numbers) < step:
            position = start + len(numbers)
            if position // length != epoch:
                epoch = position // length
                seeded = torch.Generator().manual_seed(epoch)
                order = torch.randperm(length, generator=seeded).numpy()
            offset = position % length
            numbers += order[offset : offset + step - len(numbers)].tolist()
        yield numbers


class _Checked:
    """Hands an InputError on as a value: DataLoader would put a traceback into its message."""

    def __init__(self, dataset: Samples) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> np.ndarray | InputError:
        try:
            return self._dataset[index]["tokens"]
        except InputError as error:
            return error


@dataclass(frozen=True)
class _Collate:
    """Stacks samples to a text [b, S + 1], with the edges of its documents if `eod` is given."""

    eod: int | None

    def __call__(
        self, samples: list[np.ndarray | InputError]
    ) -> tuple[torch.Tensor, torch.Tensor | None] | InputError:
        for sample in samples:
            if isinstance(sample, InputError):
                return sample
        text = torch.from_numpy(np.stack(samples))
        # Their number depends on the text: on a GPU counting them would wait for it.
        edges = None if self.eod is None else document_edges(text[:, :-1], self.eod)
        return text, edges
