"""`--manual-gc`: Python's garbage collector runs when it is told to, in the same step on all ranks.

Left to itself it runs on each rank at another time, and the others wait for that rank.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_zpp.settings.config import TrainingConfig
from megatron_zpp.settings.scheduled_values import is_due


class GarbageCollection(AbstractContextManager):
    """Decides when garbage is collected; as a context it switches the automatic collection off."""

    def __init__(self, config: TrainingConfig) -> None:
        self._manual = config.manual_gc
        self._interval = config.manual_gc_interval or None
        self._around_evaluation = config.manual_gc and not config.no_manual_gc_eval
        self._was_enabled = False

    def __enter__(self) -> "GarbageCollection":
        self._was_enabled = gc.isenabled()
        if self._manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._manual and self._was_enabled:
            gc.enable()

    def after_iteration(self, iteration: int) -> None:
        """Collect if it is time."""
        if self._manual and is_due(iteration, self._interval):
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect what training left, and after the block what the evaluation left."""
        if self._around_evaluation:
            gc.collect()
        yield
        if self._around_evaluation:
            gc.collect(generation=0)  # only objects that are younger than the last collection
