"""Who holds shards of weights, or what was made of them, and is told when they change.

Steps of all optimizers, torch's and the user's, are seen by torch's hooks around steps. Other
writes are told by those who make them. All ranks make such calls, and the same ones.

The registry is a variable of this module: a step, a `GatheredParameters` and a function of
`deepspeed.utils` get parameters and nothing else, and a tensor cannot name its holder, as
`torch.utils.swap_tensors` refuses those that have weak references. Holders are not kept alive.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

EVERYWHERE: Mapping[Tensor, Tensor] = MappingProxyType({})
Kind = TypeVar("Kind")


class ShardHolder:
    """Takes notice of changes of weights; what it does not override it ignores."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Take notice of the step of any optimizer before it is made."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Take notice of the step of any optimizer after it was made."""

    def note_written(
        self, parameters: Iterable[Tensor], where: Mapping[Tensor, Tensor], *, gathered: bool
    ) -> None:
        """Take notice of what `notify_written` was called with."""


_holders: WeakKeyDictionary[object, None] = WeakKeyDictionary()  # in the order in which they came


def add_holder(holder: object) -> None:
    """Let `holders` return an object as long as it lives, and tell it of changes."""
    _watch_steps()
    _holders[holder] = None


def remove_holder(holder: object) -> None:
    """Undo `add_holder`."""
    _holders.pop(holder, None)


def holders(kind: type[Kind]) -> list[Kind]:
    """Return the holders of a kind, in the order in which they were added."""
    return [holder for holder in _holders if isinstance(holder, kind)]


def notify_written(
    parameters: Sequence[Tensor],
    where: Mapping[Tensor, Tensor] = EVERYWHERE,
    *,
    gathered: bool = False,
) -> None:
    """Tell all holders that these parameters, as shards, were written without an optimizer.

    `where` (bool) says which elements of a shard were, if not all, and `gathered` that what was
    gathered of them was written, too.
    """
    for holder in holders(ShardHolder):
        holder.note_written(parameters, where, gathered=gathered)


@cache
def _watch_steps() -> None:
    """Tell all holders of steps, from when the first one is added."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    for holder in holders(ShardHolder):
        holder.before_step(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    for holder in holders(ShardHolder):
        holder.after_step(optimizer)
