"""The one thread that runs the model: requests wait in line, and each can be given up any time."""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Sequence

import torch

from megatron_zpp.text.generate import Piece, Request
from megatron_zpp.text.text_model import TextModel

log = logging.getLogger("megatron_zpp")


class BusyError(Exception):
    """As many requests are waiting as may."""


class Job:
    """What one client waits for, on the client's event loop; the worker only adds to it."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody listens any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """End it before its next token, or before it begins."""
        self._cancelled.set()

    def add(self, item: Piece | Exception | None) -> None:
        """From the worker: a piece, what went wrong, or None at the end."""
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the event loop is closed: the server has ended
            self.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces as they come; raises what went wrong."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Worker:
    """Runs jobs one after another; at most `most_waiting` wait while one runs."""

    def __init__(self, model: TextModel, most_waiting: int) -> None:
        self._model = model
        self._most = most_waiting
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._running: Job | None = None
        self._pending = 0  # jobs that have not ended
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Jobs behind the one that runs."""
        return max(self._pending - 1, 0)

    @property
    def is_running(self) -> bool:
        """Whether there is a job that has not ended."""
        return self._pending > 0

    @property
    def is_alive(self) -> bool:
        """Whether jobs will be run."""
        return self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Job:
        """Put a job in line; raises BusyError if it is full. To be called on an event loop."""
        job = Job(requests)
        with self._lock:
            if self._pending > self._most:
                raise BusyError
            self._pending += 1
        self._jobs.put(job)
        return job

    def give_up(self) -> None:
        """End what runs, before its next token, and run nothing more."""
        self._closed = True
        if running := self._running:
            running.cancel()

    def close(self) -> None:
        """Give up, and end the thread."""
        self.give_up()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        device = next(self._model.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # is of a thread
        while (job := self._jobs.get()) is not None:
            self._running = job
            if self._closed:
                job.cancel()
            if not job.is_cancelled:
                self._write(job)
            self._running = None
            with self._lock:
                self._pending -= 1
            job.add(None)

    def _write(self, job: Job) -> None:
        try:
            for piece in self._model.stream(job.requests, lambda row: job.is_cancelled):
                job.add(piece)
        except Exception as error:
            log.exception("a request failed")
            job.add(error)
