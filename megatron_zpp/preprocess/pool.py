"""The same function over many chunks by several processes, with results in the order of the chunks.

A few chunks are under way for each worker and no more are read, so that memory does not depend on
how much there is to do.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from zeropp.errors import InputError
from zeropp.ranks.topology import one_rust_thread

CHUNKS_PER_WORKER = 3
Given = TypeVar("Given")
Made = TypeVar("Made")


class WorkerDied(InputError):
    """A worker process was killed from outside, perhaps for want of memory."""


def in_order(
    function: Callable[[int, Given], Made], given: Iterable[Given], workers: int
) -> Iterator[tuple[Given, Made]]:
    """Each thing given and `function(number, thing)`; with no worker, in this process."""
    if not workers:
        for number, thing in enumerate(given):
            yield thing, function(number, thing)
        return
    # A fork shares what is imported already; elsewhere than on Linux it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    waiting = deque()
    try:
        for number, thing in enumerate(given):
            waiting.append((thing, pool.submit(function, number, thing)))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a worker process was killed, perhaps for want of memory; try fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _first(waiting: deque) -> tuple:
    thing, made = waiting.popleft()
    return thing, made.result()


def _start_worker() -> None:
    """Leave signals to the main process, end when it has ended, and use one core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_rust_thread()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
