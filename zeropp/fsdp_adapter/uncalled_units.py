"""Units that a model uses without calling their modules, which is where FSDP2 gathers them.

A model may call `block.forward(x)` or another method of a block, or use `block.linear.weight`. So,
during the root's forward pass, modules hold a stand-in for each parameter that is not gathered. The
first function of PyTorch that computes with one gathers its unit, which then stays gathered, as the
root does, until the backward pass ends. The program may keep one for its loss. Else a stand-in is
the shard outside of passes, and always for questions that need no values, as of profilers.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zeropp.fsdp_adapter.gathered import WholeParameter, free_gathered
from zeropp.fsdp_adapter.parameters import groups_of, state_of
from zeropp.fsdp_adapter.passes import backward_id

log = logging.getLogger("zeropp")
# What needs no values is answered by the shard, to which values are written, too.
OF_SHARDS = frozenset(
    "__dir__ __dlpack_device__ __format__ __get__ __len__ __reduce_ex__ __repr__ __set__ data_ptr"
    " dim dim_order element_size get_device is_complex is_contiguous is_floating_point is_pinned"
    " is_same_size is_shared ndimension nelement numel register_hook size storage storage_offset"
    " storage_type stride type untyped_storage".split()
)
WRITES = frozenset("__iadd__ __idiv__ __imul__ __ipow__ __isub__ __itruediv__ __setitem__".split())
TRANSPOSED = frozenset(getattr(torch.Tensor, name).__get__ for name in ("H", "T", "mH", "mT"))
DETACHED = (torch.Tensor.detach, torch.Tensor.data.__get__)


class StandIn(torch.Tensor):
    """Stands for a `parameter` whose group `gather` gathers, or refuses to, outside of passes."""

    @classmethod
    def of(
        cls, parameter: FSDPParam, gather: Callable[[], bool], *, is_leaf: bool = True
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
        return repr(args[0]) if name == "__repr__" else function(*args, **kwargs)

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
    if isinstance(parameter.sharded_param, WholeParameter) or not stand_in.gather():
        return shard_behind(stand_in)
    return parameter._unsharded_param if stand_in._is_param else parameter._unsharded_param.detach()


def _pass_on(stand_in: StandIn) -> None:
    """Give a gradient to the parameter: an `autograd.Function` takes a stand-in for a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, stand_in.grad = stand_in.grad, None
    if (whole := _whole_behind(stand_in)).requires_grad:
        whole.backward(gradient)


class _Place:
    """Where modules hold a parameter: its shard, its gathered values or, in forward, a stand-in."""

    def __init__(
        self, parameter: FSDPParam, units: "UncalledUnits", gather: Callable, *, is_root: bool
    ) -> None:
        self.parameter, self.units, self.gather = parameter, units, gather
        self.info, self.stand_in = parameter._module_info, None
        is_plain = type(self.info.module).__setattr__ is nn.Module.__setattr__
        self.is_alone = is_plain and not self.info.shared_modules
        self.set = parameter._setattr_on_modules
        if not is_root:
            parameter._setattr_on_modules = self.show

    def held(self) -> torch.Tensor | None:
        return self.info.module._parameters.get(self.info.param_name)

    def put(self, shown: torch.Tensor) -> None:
        if self.is_alone:
            self.info.module._parameters[self.info.param_name] = shown
        else:
            self.set(shown)

    def swap(self, in_forward: bool) -> None:
        """Replace the shard by the stand-in, or that by what it stands for."""
        parameter, held = self.parameter, self.held()
        if self.stand_in is None:
            self.stand_in = StandIn.of(parameter, self.gather)
        if held is parameter.sharded_param or type(held) is StandIn:
            is_away = parameter.sharded_state != ShardedState.UNSHARDED
            own = parameter.sharded_param if is_away else parameter._unsharded_param
            self.put(self.stand_in if in_forward else own)

    def show(self, shown: torch.Tensor) -> None:
        """Do as FSDP2, but keep what the program has put there in a pass, and show no shards."""
        in_forward = self.units.in_forward
        if in_forward or backward_id() != -1:
            held, shard = self.held(), self.parameter.sharded_param
            whole = getattr(self.parameter, "_unsharded_param", shard)
            if held is not shard and held is not self.stand_in and held is not whole:
                return
            if in_forward and shown is shard:
                shown = self.stand_in
        self.put(shown)


class UncalledUnits:
    """Finds such units of a root in its forward passes, gathers them, and says so once."""

    def __init__(self, root: FSDPModule) -> None:
        self._root, self.in_forward, self._has_gradients = root, False, False
        self._places, self._root_places, self._groups = [], [], []
        self._found: dict[Any, FSDPModule] = {}  # parameter groups, in order, and their units
        self._said = 0  # of these

    def add(self, units: Iterable[FSDPModule]) -> None:
        """Include units of the root, between two passes."""
        for unit in units:
            self._groups += groups_of(unit)
            is_root = unit is self._root
            if is_root:
                state = state_of(unit)
                state._pre_backward = partial(self._gather_again, state._pre_backward)
            for group in groups_of(unit):
                gather = partial(self._gather, unit, group)
                places = [_Place(e, self, gather, is_root=is_root) for e in group.fsdp_params]
                if is_root:
                    self._root_places += places
                    continue
                group.reshard = partial(self._reshard, group, places, group.reshard)
                self._places += places

    def watch(self, in_forward: bool, *, with_root: bool = False) -> None:
        """Let modules hold stand-ins for the shards that they hold, or these again.

        `with_root` says that the root itself is not called either.
        """
        if in_forward == self.in_forward:
            return
        self.in_forward, self._has_gradients = in_forward, torch.is_grad_enabled()
        if in_forward:
            state_of(self._root)._lazy_init()  # which takes what modules hold for the shards
        for place in self._places:
            place.swap(in_forward)
        for place in self._root_places if with_root else ():
            place.swap(in_forward)
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

    def _reshard(self, group: Any, places: Iterable[_Place], reshard: Callable[[], None]) -> None:
        """Free weights, or, where they stay gathered after a call, show stand-ins for them."""
        reshard()
        if self.in_forward and group.is_unsharded:
            for place in places:
                if place.held() is place.parameter._unsharded_param:
                    place.put(place.stand_in)

    def _gather(self, unit: FSDPModule, group: Any, *, is_due: bool = True) -> bool:
        """Gather a unit, or let its next use do so, as its shards are about to be written to.

        Return whether it is gathered: once a step's gradients are reduced, its pass is over.
        """
        if not is_due:
            free_gathered(unit)
        in_pass = self.in_forward or backward_id() != -1 or not self._has_gradients
        if not is_due or not (in_pass or any(each.zeropp_reducer.is_due for each in self._groups)):
            return False
        self._found[group] = unit
        group.zeropp_reducer.waits = True
        group.zeropp_reducer.is_due |= self._has_gradients
        group.unshard()
        group.wait_for_unshard()
        if self._has_gradients:
            group.zeropp_reducer.await_gradients()
        return True
