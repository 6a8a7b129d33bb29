"""Micro-batches of one rank. The entire state is the number of consumed samples.

The samples of all ranks form one sequence. A micro-step takes the next `micro_batch_size * world`
samples, and rank r takes the r-th slice of them, so neither the number of ranks nor a restart
changes the order. A larger global batch, as in a ramp-up, is more micro-steps.

Masks, positions and edges follow from the input tokens [b, S], as in megatron-core: an
end-of-document token belongs to the document that it ends, and the next token begins another one.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader

from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

ON_LINUX = sys.platform == "linux"
EXIT_SECONDS = 1.0  # within which a process exits after its connections have closed


class Samples(Protocol):
    """A dataset: item i is dict(tokens int64 [S + 1]).

    If its attribute `hides_labels` is true, negative tokens are complements (~id) of ids that have
    no loss as labels; such an end-of-document id does not end a document.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch [b, S]: tokens, labels, position_ids int64; loss_mask float32 of 0 and 1.

    `edges` int32 [n + 1]: where documents begin, if attention must not cross them; else None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    edges: torch.Tensor | None = None

    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """Return the arguments of `GPT.forward`."""
        return self.tokens, self.labels, self.loss_mask, self.position_ids, self.edges


class Loader:
    """An endless iterator of `Batch`es of one rank, prefetched by `data.num_workers` processes.

    A worker returns one tensor, the text [b, S + 1], in page-locked memory if `device` is a GPU;
    labels, masks and positions are computed on the device, asynchronously to the copy.

    consumed_samples: samples of all ranks, including those before the start. skipped: ranges of
    samples that are passed over, each of whole micro-steps. waited: seconds spent in `next` so far.
    eod: the id that ends a document. `next` raises InputError if a `single` dataset is exhausted,
    and for an invalid sample. At the end of the context manager all workers have ended, and
    InputError is raised if one was killed.
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
        skipped: Sequence[range] = (),
    ) -> None:
        self._length, self.waited, self._skipped = len(dataset), 0.0, skipped
        self.consumed_samples = _next_used(consumed_samples, skipped)
        self._step, self._data, self._eod = micro_batch_size * world, data, eod
        self._device = torch.device(device)
        self._hides_labels = getattr(dataset, "hides_labels", False)
        sample_order = _cyclic if data.dataloader_type == "cyclic" else _single
        samples = sample_order(self._length, consumed_samples, self._step, skipped)
        rank_slice = slice(rank * micro_batch_size, (rank + 1) * micro_batch_size)
        loader = DataLoader(
            _ErrorsAsValues(dataset),
            batch_sampler=(numbers[rank_slice] for numbers in samples),
            num_workers=data.num_workers,
            # Forked workers share the mapped indices; only on Linux is a fork safe.
            multiprocessing_context="fork" if data.num_workers and ON_LINUX else None,
            collate_fn=partial(_collate, eod if data.reset_attention_mask else None),
            worker_init_fn=_ignore_signals,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # PyTorch's default one would advance and change dropout
        )
        other_processes = multiprocessing.active_children()
        with _kept_handler_of_ended_children():
            self._batches = iter(loader)
        self._workers = [
            process
            for process in multiprocessing.active_children()
            if process not in other_processes
        ]

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # DataLoader or the transfer of a tensor reports it, with different errors.
        may_be_worker = isinstance(error, (RuntimeError, OSError, EOFError))
        exit_code = self._failed_exit_code() if may_be_worker else None
        self.close()
        if exit_code is not None:
            raise InputError(
                f"a data worker has died (exit code {exit_code}); the system may have killed it "
                f"because memory ran out: use fewer than --num-workers {self._data.num_workers}, "
                "or 0 to read samples in the rank itself"
            ) from error

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        result = next(self._batches, None)
        self.waited += time.perf_counter() - started
        if result is None:
            raise InputError(
                f"the data is used up: {self.consumed_samples} of its {self._length} samples are "
                f"consumed and {self._step} more are needed; give more data, train for less, or "
                "repeat it with --dataloader-type cyclic"
            )
        if isinstance(result, InputError):
            raise result
        self.consumed_samples = _next_used(self.consumed_samples + self._step, self._skipped)
        return self._batch(*result)

    def close(self) -> None:
        """End the worker processes."""
        self._batches = iter(())  # ends the workers, unless an error refers to the iterator
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers = []

    def _batch(self, text: torch.Tensor, edges: torch.Tensor | None) -> Batch:
        """Return the batch of a text [b, S + 1]."""
        text = text.to(self._device, non_blocking=True)
        ids = torch.where(text < 0, ~text, text) if self._hides_labels else text
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

    def _failed_exit_code(self) -> int | None:
        """Return the exit code of a failed worker (minus the signal that killed it), or None."""
        sentinels = connection.wait([worker.sentinel for worker in self._workers], EXIT_SECONDS)
        for worker in self._workers:
            if worker.sentinel in sentinels:
                worker.join()
        return next((worker.exitcode for worker in self._workers if worker.exitcode), None)


def _ignore_signals(worker: int) -> None:
    """Leave signals to all processes of a job to the rank, which ends its workers or saves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _kept_handler_of_ended_children() -> Iterator[None]:
    """Take back the handler of SIGCHLD that DataLoader installs.

    It raises an error wherever the rank is when a worker ends, also where nobody expects one.
    Without it the rank learns of a worker's end when it reads, after at most 5 s.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _next_used(sample: int, skipped: Sequence[range]) -> int:
    """Return the first sample from `sample` on that is in no range of `skipped`."""
    while inside := next((samples for samples in skipped if sample in samples), None):
        sample = inside.stop
    return sample


def _starts(consumed: int, step: int, skipped: Sequence[range]) -> Iterator[int]:
    """Yield the first sample of every micro-step from `consumed` on."""
    while True:
        consumed = _next_used(consumed, skipped)
        yield consumed
        consumed += step


def _single(length: int, consumed: int, step: int, skipped: Sequence[range]) -> Iterator[list[int]]:
    """Yield sample numbers in the order of the dataset, without an incomplete last step."""
    for start in _starts(consumed, step, skipped):
        if start + step > length:
            return
        yield list(range(start, start + step))


def _cyclic(length: int, consumed: int, step: int, skipped: Sequence[range]) -> Iterator[list[int]]:
    """Yield sample numbers in a random order for each epoch, seeded by its number."""
    assert length > 0
    epoch, order = -1, np.empty(0, dtype=np.int64)
    for start in _starts(consumed, step, skipped):
        numbers = []
        while len(numbers) < step:
            position = start + len(numbers)
            if position // length != epoch:
                epoch = position // length
                generator = torch.Generator().manual_seed(epoch)
                order = torch.randperm(length, generator=generator).numpy()
            offset = position % length
            numbers += order[offset : offset + step - len(numbers)].tolist()
        yield numbers


class _ErrorsAsValues:
    """Return an InputError instead of raising it: DataLoader adds a traceback to its message."""

    def __init__(self, dataset: Samples) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> np.ndarray | InputError:
        try:
            return self._dataset[index]["tokens"]
        except InputError as error:
            return error


def _collate(
    eod: int | None, samples: list[np.ndarray | InputError]
) -> tuple[torch.Tensor, torch.Tensor | None] | InputError:
    """Stack samples to a text [b, S + 1], with the edges of its documents if `eod` is not None."""
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    text = torch.from_numpy(np.stack(samples))
    # Computed in the worker: the number of edges depends on the text, which would stall a GPU.
    edges = None if eod is None else document_edges(text[:, :-1], eod)
    return text, edges


def loss_mask(tokens: torch.Tensor, eod: int, eod_mask_loss: bool) -> torch.Tensor:
    """Return ones, with `eod_mask_loss` zero where the input ends a document; float32 [b, S]."""
    if eod_mask_loss:
        return (tokens != eod).float()
    return torch.ones_like(tokens, dtype=torch.float32)


def document_edges(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Return the offsets at which documents begin, and the number of tokens; int32 [n + 1].

    The rows are concatenated. Every row begins a document, and so does every token after `eod`.
    """
    is_first = torch.ones(tokens.shape, dtype=torch.bool)
    is_first[:, 1:] = tokens[:, :-1] == eod
    starts = is_first.flatten().nonzero().flatten()
    return torch.cat((starts, torch.tensor([tokens.numel()]))).to(torch.int32)


def position_ids(tokens: torch.Tensor, eod: int, reset_position_ids: bool) -> torch.Tensor:
    """Return 0, 1, 2, ... for each row; int64 [b, S].

    With `reset_position_ids` the positions of every document start at 0.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    if reset_position_ids:
        # The position at which the document of each token begins.
        starts = torch.zeros_like(positions)
        starts[:, 1:] = positions[:, 1:] * (tokens[:, :-1] == eod)
        positions = positions - starts.cummax(dim=1).values
    return positions
