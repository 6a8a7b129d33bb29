"""Passes: which one runs, what precedes and follows it, and how a failed one ends."""

from collections.abc import Callable, Set
from functools import partial, wraps
from types import FunctionType
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from zeropp.errors import InputError
from zeropp.fsdp_adapter.gradients import forget_forward
from zeropp.fsdp_adapter.parameters import Unit, groups_of_state, state_of


def backward_id() -> int:
    """Return an id of the backward pass running on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None], unit: Unit | None = None) -> None:
    """Call `callback` at the end of the running backward pass, before `backward()` returns.

    A stage of a pipeline reduces its gradients after its backward passes: `callback` is then called
    when FSDP2 has finished those of the root that has this `unit`.
    """
    if unit is None or backward_id() != -1:
        Variable._execution_engine.queue_callback(callback)
        return
    root = next(each for each in state_of(unit)._state_ctx.all_states if each._is_root)
    finish = root._root_post_backward_final_callback

    def finish_and_call() -> None:
        vars(root).pop("_root_post_backward_final_callback", None)
        finish()
        callback()

    root._root_post_backward_final_callback = finish_and_call


def before_pass(model: nn.Module, prepare: Callable[[Set[nn.Module]], None]) -> Callable[[], None]:
    """Call `prepare` before each forward pass that begins in `model`, with what may run in it.

    Those are the modules inside the unit that it begins with. A pass of a model around this one
    begins in it wherever it enters an outermost unit. Returns what undoes this.
    """
    units = [each for each in model.modules() if isinstance(each, FSDPModule)]
    inner = {each for unit in units for child in unit.children() for each in child.modules()}
    outermost = {unit._get_fsdp_state() for unit in units if unit not in inner}
    states = {unit._get_fsdp_state() for unit in units}

    def prepare_and_begin(
        state: object, inside: Set[nn.Module], begin: Callable, module: nn.Module, *inputs: object
    ) -> tuple:
        root = state._state_ctx.iter_forward_root
        enters = state in outermost and root is not state
        if backward_id() == -1 and (root is None or enters):
            prepare(inside)
        if any(inputs):
            return begin(module, *inputs)
        begin(module, (None,), {})  # on a GPU FSDP2 moves inputs, and torch 2.11 expects one
        return inputs

    def undo() -> None:
        for state in states:
            del state._root_pre_forward

    for state in states:
        inside = {each for module in state._modules for each in module.modules()}
        begin = state._root_pre_forward
        state._root_pre_forward = partial(prepare_and_begin, state, inside, begin)
    return undo


def call_methods_by(model: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(method, ...)` call each public method beside `forward` of the model's classes.

    These are the class that defines `forward` and its subclasses.
    """
    for kind in type(model).__mro__:
        if kind is nn.Module:
            return
        for name, each in vars(kind).items() if issubclass(kind, nn.Module) else ():
            is_own = not name.startswith("_") and not hasattr(nn.Module, name)
            if is_own and isinstance(each, FunctionType):
                method = getattr(model, name)
                setattr(model, name, wraps(method)(partial(call, method)))
        if "forward" in vars(kind):
            return


def note_backward(root: FSDPModule, output: Any) -> Any:
    """Let the root take note of backward passes from an output that its forward did not make."""
    return state_of(root)._register_pre_backward_hook(output)


def is_in_pass(unit: Unit) -> bool:
    """Whether FSDP2 waits for the end of a pass of the root module that has this unit."""
    context = state_of(unit)._state_ctx
    return context.iter_forward_root is not None or awaits_end_of_backward(unit)


def awaits_end_of_backward(unit: Unit) -> bool:
    """Whether a backward pass of the root module that has this unit has begun and not ended."""
    return state_of(unit)._state_ctx.post_backward_final_callback_queued


def abandon_pass(root: FSDPModule) -> None:
    """Let FSDP2 forget a pass that failed; gradients stay as they are.

    Raises InputError where FSDP2 cannot, before torch 2.13.
    """
    if not hasattr(root, "reset_iter_state"):
        raise InputError(
            f"the last pass ended with an exception, after which torch {torch.__version__} cannot "
            "begin another one: load a checkpoint in a new process, or use torch 2.13"
        )
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in groups_of_state(state):
            forget_forward(group)
    root.reset_iter_state()


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
