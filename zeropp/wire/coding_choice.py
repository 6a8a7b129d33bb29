"""Whether coding messages takes less time than it saves: steps of training show it.

What is quantized does not depend on it, so that no digit of a run does.
"""

import time
from collections.abc import Generator, Sequence
from itertools import cycle
from statistics import median

import torch
import torch.distributed as dist

from zeropp.ranks.groups import explained_waits, shared_group
from zeropp.wire.kept_weights import holds_shards
from zeropp.wire.shard_holders import ShardHolder, add_holder
from zeropp.wire.traffic import Coding

PAIRS = 5  # of steps of a trial, one as those before it, and one with the other choice
CLEAR = 1.25  # times as long, after which a trial ends
PAUSE = 8  # steps between two trials, at least
SHARE = 0.01  # of the time that trials may cost
GAIN = 0.01  # of a step's time, for which a choice is changed


class CodingTrials(ShardHolder):
    """Times passes of training with and without coding, of one purpose after another.

    After a trial all ranks, `axis`, keep what took less time. The next one begins when the slower
    steps of this one come to a SHARE of the time, so that a choice follows links that change.
    """

    def __init__(self, axis: Sequence[int], tried: Sequence[Coding], device: torch.device) -> None:
        self._axis, self._device = axis, device
        self._has_stepped = self._is_timed = False
        self._begin: float | None = None  # of the first pass since a step
        self._trials = self._try(tried)
        next(self._trials)
        add_holder(self)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that all ranks make together."""
        self._has_stepped = self._has_stepped or holds_shards(optimizer)

    def begin_pass(self) -> None:
        """Take note that a forward pass begins; time the first that trains after a step."""
        if self._has_stepped and torch.is_grad_enabled():
            self._has_stepped, self._begin = False, self._now()

    def end_pass(self) -> None:
        """Take note that a backward pass has ended on all ranks."""
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._trials.send(self._now() - begin)

    def _try(self, tried: Sequence[Coding]) -> Generator[None, float, None]:
        """Take the seconds of steps, and change what takes less time when it is changed."""
        pause = PAUSE
        for coding in cycle(tried):
            for _ in range(pause):
                yield
            self._is_timed, ratios = True, []
            while len(ratios) < PAIRS and max(ratios, default=0) < CLEAR:
                kept = yield
                coding.is_on = not coding.is_on
                other = yield
                coding.is_on = not coding.is_on
                ratios.append(self._ratio(other, kept))
            self._is_timed, ratio = False, median(ratios)
            pause = max(PAUSE, round(len(ratios) * (ratio - 1) / SHARE))
            if ratio < 1 - GAIN:
                coding.is_on = not coding.is_on

    def _ratio(self, *seconds: float) -> float:
        """Return the ratio of two times, summed over all ranks."""
        total = torch.tensor(seconds)
        group = shared_group("coding", self._axis, self._axis)
        with explained_waits(group, lambda: "a comparison of steps with and without coding"):
            dist.all_reduce(total, group=group)
        return (total[0] / total[1]).item()

    def _now(self) -> float:
        if self._is_timed and self._device.type == "cuda":  # whose work the host only queues
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
