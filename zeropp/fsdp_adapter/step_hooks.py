"""Hooks around the steps of all optimizers, that end with the object they belong to.

PyTorch calls the hooks of a dictionary that may not change meanwhile, and the garbage collector may
free their owner at any time, also then. So the hooks of owners that are gone do nothing, and are
removed when the next one is registered.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

Hook = Callable[[torch.optim.Optimizer], None]


class _StepHook:
    """Calls a function with the optimizer while the owner lives."""

    def __init__(self, owner: Any, function: Hook) -> None:
        self.owner, self._function = weakref.ref(owner), function

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.owner() is not None:
            self._function(optimizer)


def before_any_step(owner: Any, function: Hook) -> RemovableHandle:
    """Call `function` before each step of any optimizer; it must not hold `owner`."""
    return _registered(register_optimizer_step_pre_hook, owner, function)


def after_any_step(owner: Any, function: Hook) -> RemovableHandle:
    """Call `function` after each step of any optimizer; it must not hold `owner`."""
    return _registered(register_optimizer_step_post_hook, owner, function)


def _registered(register: Callable, owner: Any, function: Hook) -> RemovableHandle:
    handle = register(_StepHook(owner, function))
    hooks = handle.hooks_dict_ref()
    for number, hook in [*hooks.items()]:
        if isinstance(hook, _StepHook) and hook.owner() is None:
            del hooks[number]
    return handle
