"""Whether coding messages takes less time than it saves: steps of training show it.

What is quantized does not depend on it, so that no digit of a run does.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat
from statistics import median

import torch
import torch.distributed as dist

from zeropp.ranks.groups import shared_group
from zeropp.ranks.waits import explained_waits
from zeropp.wire.kept_weights import holds_shards
from zeropp.wire.rank_group import Coding
from zeropp.wire.route import Route
from zeropp.wire.shard_holders import ShardHolder, add_holder

PAIRS = 5  # of steps of a trial, one as those before it, and one with the other choice
CLEAR = 1.25  # times as long, after which a trial ends
PAUSE = 8  # steps between two trials, at least
SHARE = 0.01  # of the time that trials may cost
GAIN = 0.01  # of a step's time, for which a choice is changed


def coding_of(route: Route) -> Coding:
    """Return how training begins, coded if there is a choice: that costs less where it is wrong."""
    is_tried = route.is_coded is None and route.nodes.machines > 1
    return Coding(bool(route.is_coded) or is_tried, is_tried)


class CodingTrials(ShardHolder):
    """Times steps of training with and without coding, of one purpose after another.

    After a trial all ranks, `axis`, keep what took less time. The next one begins when the slower
    steps of this one come to a SHARE of the time, so that a choice follows links that change.
    """

    def __init__(self, axis: Sequence[int], tried: Sequence[Coding], device: torch.device) -> None:
        self._axis, self._device, self._trials = axis, device, self._try(tried)
        self._has_stepped = False
        add_holder(self)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that all ranks make together."""
        self._has_stepped = self._has_stepped or holds_shards(optimizer)

    def end_pass(self) -> None:
        """Take note that a backward pass has ended; the first after a step begins another one."""
        if self._has_stepped:
            self._has_stepped = False
            next(self._trials)

    def _try(self, tried: Sequence[Coding]) -> Iterator[None]:
        """Yield for each step; one after the other is changed if that takes less time."""
        pause = PAUSE
        for coding in cycle(tried):
            yield from repeat(None, pause)
            ratios: list[float] = []
            while len(ratios) < PAIRS and max(ratios, default=0) < CLEAR:
                begin = self._now()
                yield
                coding.is_on, middle = not coding.is_on, self._now()
                yield
                coding.is_on, end = not coding.is_on, self._now()
                ratios.append(self._ratio(end - middle, middle - begin))
            ratio = median(ratios)
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
        if self._device.type == "cuda":  # whose steps the host would only queue
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
