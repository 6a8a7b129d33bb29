"""Who steps together: all ranks of a run, or replicas that train independently."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import CheckpointConfig, ParallelConfig
from zeropp import Sharding, ZeroConfig
from zeropp.ranks import Environment
from zeropp.settings import CAPABILITIES as ZEROS
from zeropp.settings import declared, modules_of
from zeropp.wire import Traffic

OUTER = "outer"  # the purpose of what replicas send each other, in ledgers


class Replicas:
    """All ranks take each step together, as one replica. Others override what they do.

    index, count: this replica's among those that take part now. planned: how many the global batch
    is for. number: what names its folders. iteration: of its checkpoint that it goes on from, where
    others decide it. launch: what names this start, on all alike.
    independent: whether replicas step by themselves, with folders and checkpoints of their own.
    joins_and_leaves: whether others may join or leave; `membership` then tells who takes part.
    """

    index, count, planned, number, iteration = 0, 1, 1, 0, 0
    launch = ""
    independent = joins_and_leaves = joins = False
    membership: object = None
    ledger: Traffic | None = None

    def bind(self, zero: ZeroConfig, sharding: Sharding, optimizer: torch.optim.Optimizer) -> None:
        """Take note of what this replica trains."""

    def sum(self, *values: float) -> list[float]:
        """Return sums over replicas, where all of them do the same beside their steps."""
        return list(values)

    def sum_in_step(self, step: int, values: Tensor) -> Tensor:
        """Return the sum of fp64 values over replicas that take a step together."""
        return values

    def before_update(self, step: int) -> None:
        """Average gradients over replicas, where they take the step together."""

    def after_update(self, step: int, *, last: bool) -> None:
        """Take the outer step, where it is due."""

    def aligned(self, step: int) -> bool:
        """Whether all are at the same place after a step: they may stop there, and save."""
        return True

    def join(self, progress: Any) -> bool:
        """Let replicas that join get the run's progress; get it if this one does, and say so."""
        return False

    def evaluate(self, sums_of: Callable[[int, int], Sequence[float]]) -> Sequence[float]:
        """Return sums over the whole of an evaluation: `sums_of(share, shares)` is of a part."""
        return sums_of(0, 1)

    def kept(self, newest: int | None, *, beside: bool) -> int | None:
        """Return how many checkpoints stay, where `newest` are asked for."""
        return newest

    def state(self) -> Mapping[str, Tensor]:
        """Return what a checkpoint holds of it, by name."""
        return {}

    def resume(self, read: Mapping[str, Tensor], *saved: Any) -> None:
        """Go on from a checkpoint, of which `read` has what `state` has returned."""

    def expected(self, step: int | None = None) -> Mapping[tuple[str, str], float]:
        """Return the bytes that this rank sends for it per step, around a step or the last one."""
        return {}

    def notices(self, zero: ZeroConfig) -> Iterable[str]:
        """Yield which settings for messages between nodes have no effect in one node."""
        return ()

    def rows(self, ranks: Any) -> Iterable[tuple[str, str]]:
        """Yield rows (name, text) of the table before training."""
        return ()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all replicas."""
        return [value]

    def close(self, *, succeeded: bool) -> None:
        """Leave, or end together."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """How a process comes to its replica; by default all ranks are one.

    world: its environment among the ranks of its replica. join: returns the replicas, and the part
    of the store of all ranks that is this one's; the second argument limits collectives.
    """

    world: Environment
    join: Callable[[dist.Store, timedelta], tuple[Replicas, dist.Store]] = lambda store, limit: (
        Replicas(),
        store,
    )


def joining_of(
    zero: ZeroConfig,
    checkpoint: CheckpointConfig,
    parallel: ParallelConfig,
    environment: Environment,
    settings: Mapping[str, str],
) -> Joining:
    """Return how processes come to replicas; `settings` are those that all ranks have alike."""
    for dotted, _ in declared("INDEPENDENT_STEPS", ZEROS):
        if zero.value(dotted) != zero.setting(dotted).default:
            (module,) = modules_of("replicas", CAPABILITIES)
            return module.joining(zero, checkpoint, parallel, environment, settings)
    return Joining(world=environment)
