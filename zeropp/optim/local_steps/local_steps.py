"""Nodes that step alone: each trains a replica, and all meet every so-many steps.

    step, step, ... alone  ->  agreed weights - own weights  ->  mean over nodes  ->  Nesterov
                           ->  new agreed weights, with which all nodes go on

Sources: Local SGD (Stich 2019); DiLoCo (Douillard et al. 2023, arXiv:2311.08105), algorithm 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeropp.optim.local_steps.outer_group import OuterGroup
from zeropp.optim.local_steps.outer_mean import OuterMean
from zeropp.optim.local_steps.trained_weights import TrainedWeights
from zeropp.settings.sync_schedule import SyncSchedule

OUTER = "outer."  # what its names in checkpoints begin with
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """How nodes meet: the bits of a number that is sent, and SGD with Nesterov's momentum.

    on_host: the agreed weights are in the host's memory.
    """

    bits: int = 4
    lr: float = 0.7
    momentum: float = 0.5
    on_host: bool = False


@dataclass(kw_only=True)
class LocalSteps:
    """What a node does beside its own steps, which are numbered from 1.

    `agreed` are the weights after the last exchange, the same on all nodes; `momentum` is that of
    the elements that this node owns.
    """

    weights: TrainedWeights
    group: OuterGroup
    schedule: SyncSchedule
    options: OuterOptions = OuterOptions()
    mean: OuterMean = field(init=False)
    agreed: list[Tensor] = field(init=False)
    momentum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        weights = self.weights.read()
        device = weights[0].device if weights else HOST
        sizes = [len(each) for each in weights]
        self.mean = OuterMean(sizes, self.group, self.options.bits, device)
        self.momentum = torch.zeros_like(self.mean.error)
        where = HOST if self.options.on_host else device
        self.agreed = [each.to(where, copy=True) for each in weights]

    def before_update(self, step: int) -> None:
        """Average the gradients of a step over nodes where they do not step alone."""
        if self.schedule.averages_gradients(step):
            gradients = self.weights.gradients()
            averaged = self.group.start(lambda: self.mean.run(gradients))
            self.weights.write_gradients(averaged.result())

    def after_update(self, step: int, *, is_last: bool = False) -> None:
        """Exchange how far the nodes came, if that is due after a step, or it is the last one."""
        if self.schedule.averages_gradients(step):
            self._agree(self.weights.read())
        elif is_last or self.schedule.is_due(step):
            self._exchange()

    def differs(self, step: int) -> bool:
        """Whether the nodes have different weights after a step."""
        return not (self.schedule.averages_gradients(step) or self.schedule.is_due(step))

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this node, by name and sharded as the weights are."""
        parts = {
            "agreed": self.agreed,
            "momentum": self.mean.spread(self.momentum),
            "error": self.mean.spread(self.mean.error),
        }
        return {
            f"{OUTER}{name}.{part}": tensor
            for part, values in parts.items()
            for name, tensor in self.weights.saved(values).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` has returned, read from a checkpoint of as many nodes."""

        def values(part: str) -> list[Tensor]:
            ending = f".{part}"
            return self.weights.loaded(
                {
                    name.removeprefix(OUTER).removesuffix(ending): tensor
                    for name, tensor in state.items()
                    if name.endswith(ending)
                }
            )

        self._agree(values("agreed"))
        self.momentum = self.mean.own(values("momentum"))
        self.mean.error = self.mean.own(values("error"))

    def restart(self) -> None:
        """Go on from the weights as they are, which are the same on all nodes."""
        self._agree(self.weights.read())
        self.momentum.zero_()
        self.mean.error.zero_()

    @torch.no_grad()
    def _exchange(self) -> None:
        own = self.weights.read()
        differences = [
            agreed.to(each.device) - each for agreed, each in zip(self.agreed, own, strict=True)
        ]
        updates = self.group.start(lambda: self.mean.run(differences, self._nesterov)).result()
        for agreed, update in zip(self.agreed, updates, strict=True):
            agreed -= update.to(agreed.device)
        self.weights.write(self.agreed)

    def _nesterov(self, mean: Tensor) -> Tensor:
        options = self.options
        self.momentum = options.momentum * self.momentum + mean
        return options.lr * (mean + options.momentum * self.momentum)

    def _agree(self, weights: list[Tensor]) -> None:
        for agreed, each in zip(self.agreed, weights, strict=True):
            agreed.copy_(each)

    def expected_traffic(self, step: int) -> Mapping[tuple[str, str], float]:
        """Return the bytes, before coding, that this rank sends per step, by (purpose, hop)."""
        interval = self.schedule.interval(step)
        return {("outer", "across_nodes"): self.mean.message_bytes / interval}
