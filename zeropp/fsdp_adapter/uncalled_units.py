"""Units that a model uses without calling their modules, which is where FSDP2 gathers them.

A model may call `block.forward(x)` or another method of a block, or use `block.linear.weight`. So,
during the root's forward pass, modules hold a stand-in for each parameter that is not gathered. The
first function of PyTorch that computes with one gathers its unit, which then stays gathered, as the
root does, until the backward pass ends.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zeropp.fsdp_adapter.gathered import free_gathered
from zeropp.fsdp_adapter.param_groups import groups_of, state_of
from zeropp.fsdp_adapter.passes import backward_id
from zeropp.fsdp_adapter.whole_parameters import WholeParameter

log = logging.getLogger("zeropp")
# What needs no values is answered by the shard, to which values are written, too.
OF_SHARDS = frozenset(
    "__get__ __len__ __repr__ __set__ data_ptr dim element_size get_device is_complex is_contiguous"
    " is_floating_point ndimension nelement numel register_hook size stride type".split()
)
WRITES = frozenset("__iadd__ __idiv__ __imul__ __ipow__ __isub__ __itruediv__ __setitem__".split())
TRANSPOSED = frozenset(getattr(torch.Tensor, name).__get__ for name in ("H", "T", "mH", "mT"))
DETACHED = (torch.Tensor.detach, torch.Tensor.data.__get__)


class StandIn(torch.Tensor):
    """Stands for a `parameter` whose group `gather` gathers."""

    @classmethod
    def of(
        cls, parameter: FSDPParam, gather: Callable[[], None], *, is_leaf: bool = True
    ) -> "StandIn":
        """Return one of a parameter whose dtypes FSDP2 has set, or of it detached."""
        dtype = parameter.param_dtype or parameter.orig_dtype
        like = dict(dtype=dtype, device=parameter.device, requires_grad=is_leaf)
        result = torch.Tensor._make_wrapper_subclass(cls, parameter._orig_size, **like)
        result.parameter, result.gather, result._is_param = parameter, gather, is_leaf
        if is_leaf:
            with torch._C.DisableTorchFunctionSubclass():
                result.register_post_accumulate_grad_hook(_pass_on)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter.sharded_param, name)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in DETACHED and backward_id() == -1:
            return cls.of(args[0].parameter, args[0].gather, is_leaf=False)
        name, kwargs = function.__name__, kwargs or {}
        is_write = name in WRITES or (name.endswith("_") and not name.endswith("__"))
        first = pytree.tree_leaves(args)[0] if is_write else None
        if is_write := isinstance(first, cls):
            first.gather(is_due=False)
            replicate = partial(_replicated, shard_behind(first))
            args, kwargs = pytree.tree_map_only(torch.Tensor, replicate, (args, kwargs))
        of_shards = is_write or (name in OF_SHARDS and function not in TRANSPOSED)
        behind = shard_behind if of_shards else _whole_behind
        args, kwargs = pytree.tree_map_only(cls, behind, (args, kwargs))
        return function(*args, **kwargs)

    __torch_dispatch__ = __torch_function__

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(_whole_behind(self), memo)


def shard_behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard that a tensor stands for, or else the tensor."""
    if not isinstance(tensor, StandIn):
        return tensor
    shard = tensor.parameter.sharded_param
    return shard if tensor._is_param else shard.detach()


def _replicated(shard: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is to be written to a shard, on the shard's mesh."""
    if isinstance(tensor, (StandIn, DTensor)) or not isinstance(shard, DTensor):
        return tensor
    return DTensor.from_local(tensor, shard.device_mesh, run_check=False)


def _whole_behind(stand_in: StandIn) -> torch.Tensor:
    parameter = stand_in.parameter
    if isinstance(parameter.sharded_param, WholeParameter):
        return parameter.sharded_param
    stand_in.gather()
    return parameter._unsharded_param if stand_in._is_param else parameter._unsharded_param.detach()


def _pass_on(stand_in: StandIn) -> None:
    """Give a gradient to the parameter: an `autograd.Function` takes a stand-in for a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, stand_in.grad = stand_in.grad, None
    if (whole := _whole_behind(stand_in)).requires_grad:
        whole.backward(gradient)


def _held(parameter: FSDPParam) -> torch.Tensor | None:
    """Return what the parameter's module holds in its place."""
    info = parameter._module_info
    return info.module._parameters.get(info.param_name)


class UncalledUnits:
    """Finds such units of a root in its forward passes, gathers them, and says so once."""

    def __init__(self, root: FSDPModule) -> None:
        self._root, self._in_forward, self._has_gradients = root, False, False
        self._stand_ins: dict[FSDPParam, tuple[Callable[[], StandIn], Callable]] = {}
        self._found: dict[Any, FSDPModule] = {}  # parameter groups, in order, and their units
        self._said = 0  # of these

    def add(self, units: Iterable[FSDPModule]) -> None:
        """Include units of the root, between two passes."""
        for unit in units:
            if unit is self._root:
                state = state_of(unit)
                state._pre_backward = partial(self._gather_again, state._pre_backward)
                continue
            for group in groups_of(unit):
                group.reshard = partial(self._reshard, group, group.reshard)
                for each in group.fsdp_params:
                    make = partial(StandIn.of, each, partial(self._gather, unit, group))
                    show = each._setattr_on_modules
                    self._stand_ins[each] = cache(make), show
                    each._setattr_on_modules = partial(self._show, each, show)

    def watch(self, in_forward: bool) -> None:
        """Let modules hold stand-ins for the shards that they hold, or these again."""
        if in_forward == self._in_forward:
            return
        self._in_forward, self._has_gradients = in_forward, torch.is_grad_enabled()
        if in_forward:
            state_of(self._root)._lazy_init()  # which takes what modules hold for the shards
        for each, (stand_in, show) in self._stand_ins.items():
            if (held := _held(each)) is each.sharded_param or type(held) is StandIn:
                is_away = each.sharded_state != ShardedState.UNSHARDED
                own = each.sharded_param if is_away else each._unsharded_param
                show(stand_in() if in_forward else own)
        if self._said < len(self._found):
            names = (group._module_fqn for group in [*self._found][self._said :])
            log.info(
                "the model uses parameters of %s without calling these modules: they are gathered "
                "when they are first used, and stay so until the backward pass ends",
                ", ".join(names),
            )
            self._said = len(self._found)

    def _gather_again(self, begin: Callable, gradient: torch.Tensor) -> torch.Tensor:
        """Gather what was found, as the root is, for one more backward pass."""
        for group, unit in self._found.items():
            self._gather(unit, group)
        return begin(gradient)

    def _show(self, parameter: FSDPParam, show: Callable, shown: torch.Tensor) -> None:
        if self._in_forward or backward_id() != -1:
            held, shard = _held(parameter), parameter.sharded_param
            is_own = held is shard or held is getattr(parameter, "_unsharded_param", shard)
            if not is_own and getattr(held, "parameter", None) is not parameter:
                return  # the program has put another value in its place
            if self._in_forward and shown is shard:
                shown = self._stand_ins[parameter][0]()
        show(shown)

    def _reshard(self, group: Any, reshard: Callable[[], None]) -> None:
        """Free weights, or, where they stay gathered after a call, show stand-ins for them."""
        reshard()
        if self._in_forward and group.is_unsharded:
            for each in group.fsdp_params:
                if _held(each) is each._unsharded_param:
                    stand_in, show = self._stand_ins[each]
                    show(stand_in())

    def _gather(self, unit: FSDPModule, group: Any, *, is_due: bool = True) -> None:
        """Gather a unit, or let its next use do so, as its shards are about to be written to."""
        if not is_due:
            free_gathered(unit)
            return
        self._found[group] = unit
        group.zeropp_reducer.waits = True
        group.zeropp_reducer.is_due |= self._has_gradients
        group.unshard()
        group.wait_for_unshard()
