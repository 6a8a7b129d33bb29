"""Apply a function to many items in worker processes, with results in the order of the items.

Only a few items per worker are in progress at a time, so that the memory does not depend on the
number of items.
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
from zeropp.ranks import use_one_rust_thread

ITEMS_PER_WORKER = 3  # in progress
Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerDied(InputError):
    """A worker process was killed from outside, for example because memory ran out."""


def map_in_order(
    function: Callable[[int, Item], Result], items: Iterable[Item], num_workers: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with `function(index, item)`, in the order of the items.

    With `num_workers` 0 the function is called in this process. Raises WorkerDied if a worker is
    killed.
    """
    if not num_workers:
        for index, item in enumerate(items):
            yield item, function(index, item)
        return
    # Forked workers inherit what is already imported; only on Linux is a fork safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(num_workers, context, _initialize_worker)
    in_progress = deque()
    try:
        for index, item in enumerate(items):
            in_progress.append((item, pool.submit(function, index, item)))
            if len(in_progress) >= ITEMS_PER_WORKER * num_workers:
                yield _wait_for_first(in_progress)
        while in_progress:
            yield _wait_for_first(in_progress)
    except BrokenProcessPool as error:
        raise WorkerDied(
            "a worker process was killed, perhaps because memory ran out; try fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _wait_for_first(in_progress: deque) -> tuple:
    item, future = in_progress.popleft()
    return item, future.result()


def _initialize_worker() -> None:
    """Ignore the signals that the main process handles, exit when it has exited, use one core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    use_one_rust_thread()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
