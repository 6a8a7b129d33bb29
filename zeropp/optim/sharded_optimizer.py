"""What steps, checkpoints and meters need of an optimizer, ours or any other."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.wire.rank_group import Message
from zeropp.wire.traffic import Traffic

Masters = Mapping[nn.Parameter, nn.Parameter]
NOTHING: Mapping = MappingProxyType({})
OPTIMIZER = "optimizer"  # the purpose of what optimizers send, in ledgers


class OptimizerFacts:
    """What holds of an optimizer; by default of one of torch's or a user's, on the model's weights.

    masters: the model's parameters -> fp32 weights that it holds in their place, after the last
    step. copies: parameters -> 16-bit tensors that a step writes too. is_delayed: the model's
    weights are those before the last step. ledger: of the bytes that it sends. why_fixed: why no
    parameter may be added or frozen; "" where one may.
    """

    masters: Masters = NOTHING
    copies: Mapping[Tensor, Tensor] = NOTHING
    is_delayed = False
    ledger: Traffic | None = None
    why_fixed = ""

    def await_gradients(self) -> None:
        """Wait until the gradients are where `step` reads them; by default they always are."""

    def settle(self) -> None:
        """Wait until parameters and state are those after the last step; they always are."""

    def loaded(self, *, behind: bool) -> None:
        """Take note that masters were read from a file; with `behind` the model's weights too."""

    def messages(self) -> Iterable[Message]:
        """Yield what this rank sends in a step, the mean of the steps; nothing by default."""
        return ()

    def flops(self) -> int | None:
        """Return the operations of this rank in a step beside element-wise ones; None: there are
        no others."""
        return None

    def state_numbers(self, group: Mapping[str, Any]) -> int:
        """Return how many numbers of state each weight of a group has; by default Adam's two."""
        return 2


class ShardedOptimizer(OptimizerFacts, torch.optim.Optimizer):
    """An optimizer whose step takes a factor, and skips a step with a factor that is not finite."""

    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: Tensor | None = None
    ) -> Any:
        """Update the parameters from their gradients times `factor`, 0-d."""
        raise NotImplementedError


def sharded(optimizer: torch.optim.Optimizer | None) -> OptimizerFacts:
    """Return an optimizer of ours as it is, and the default facts for any other, or None."""
    return optimizer if takes_factor(optimizer) else OptimizerFacts()


def takes_factor(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether an optimizer unscales and clips in its step, so that the host need not wait."""
    return isinstance(optimizer, ShardedOptimizer)


def state_numbers_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Return how many numbers of state an optimizer has for a weight, on average."""
    groups, known = optimizer.param_groups, sharded(optimizer)
    sizes = [sum(each.numel() for each in group["params"]) for group in groups]
    numbers = map(known.state_numbers, groups)
    return sum(a * b for a, b in zip(sizes, numbers, strict=True)) / sum(sizes)
