"""Hooks in a module that call a method of their owner while it lives."""

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch

from zeropp.fsdp_adapter.passes import backward_id


class OwnerHook:
    """Calls a method of an owner while that lives; does nothing in a copy of its module."""

    def __init__(self, method: Callable | None = None) -> None:
        self._method = (lambda: None) if method is None else WeakMethod(method)

    @torch.compiler.disable
    def __call__(self, *arguments: Any) -> Any:
        method = self._method()
        return None if method is None else method(*arguments)

    def __deepcopy__(self, _: object) -> "OwnerHook":
        return OwnerHook()


class GradientHook(OwnerHook):
    """Divides gradients by what the method returns, once in each backward pass, if anything."""

    _pass, _divisor, is_off = -1, None, False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.is_off:  # quick, as each parameter has this hook
            return None
        if (number := backward_id()) != self._pass:
            self._divisor, self._pass = super().__call__(), number
        return self._divisor and gradient / self._divisor
