"""State dicts and deep copies of an engine's module are plain: whole tensors.

`state_dict()` gathers a sharded weight in fp32, after all ranks have said that they are there to do
so. Where parameters are whole between steps, at stages 0 to 2, it copies them, and nothing is sent.
`load_state_dict` of whole tensors keeps this rank's parts of them, in fp32. `copy.deepcopy` makes
the plain model of such a state. A plain `zeropp.shard` leaves all this to FSDP2.
"""

import logging
import weakref
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.deepspeed.parameter_values import found
from zeropp.errors import InputError
from zeropp.ranks.meeting import AbsentRanksError, meet
from zeropp.sharding.shard import is_whole, part_for_rank
from zeropp.sharding.sharding import Sharding
from zeropp.wire.quantized_shard import as_numbers

StateDict = MutableMapping[str, Any]
log = logging.getLogger("zeropp")
LIMIT = timedelta(seconds=25)  # for ranks to come to a state dict


class WholeStateDicts:
    """Turns the shards in state dicts of a model and of its submodules into whole tensors.

    With `keep_vars`, `state_dict` returns the model's own parameters, as shards. Weights that are
    stored quantized are returned as the numbers that they stand for.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._group: dist.ProcessGroup = sharding.group
        self._loading: dict[int, torch.Tensor] = {}  # by the whole parameters to load them into
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # The last state dict that ranks agreed to fill, what it has, and what makes it of shards.
        self._state: weakref.ref | None = None
        self._made_of = weakref.WeakValueDictionary[int, torch.Tensor]()
        self._of_shard: Callable[[DTensor], torch.Tensor] | None = None

    def include(self, model: nn.Module) -> None:
        """Let state dicts and copies of these modules be whole; to be called again for added ones.

        Whatever else changes their state dicts must have been registered before.
        """
        for module in model.modules():
            if module not in self._modules:
                self._modules.add(module)
                # A function of its own for each, on which PyTorch sets an attribute.
                module.register_state_dict_post_hook(partial(self._gather))
                module.register_load_state_dict_pre_hook(self._split)
                module.register_load_state_dict_post_hook(partial(self._load_exactly))
                if isinstance(module, fsdp.FSDPModule):
                    fsdp.use_deepcopy(module, self._copy)

    def __deepcopy__(self, _: object) -> "WholeStateDicts":
        """Serve copies of the modules as well: copying a module also copies its hooks."""
        return self

    def _copy(self, unit: nn.Module, memo: dict) -> nn.Module:
        """Return a plain copy of a unit, as `copy.deepcopy` does; gathers as `state_dict` does."""
        self._require_units(memo)
        state = unit.state_dict()
        weights = []
        for name, parameter in unit.named_parameters():
            whole = state.pop(name)
            if isinstance(whole, DTensor) or whole.shape != parameter.shape:
                raise InputError(
                    f"copy.deepcopy inside GatheredParameters, which was not given {name}: copy "
                    "the model outside, on all ranks"
                )
            weights.append((parameter, whole.detach().to(parameter.device, copy=True)))
        return fsdp.plain_copy(unit, weights, memo)

    def _require_units(self, memo: dict) -> None:
        """Raise InputError if a copied module around units has shards itself, in whole modules."""
        for around in (each for each in self._modules if id(each) in memo):
            units = (each for each in around.modules() if isinstance(each, fsdp.FSDPModule))
            in_units = {parameter for unit in units for parameter in unit.parameters()}
            for parameter in around.parameters():
                held = memo.get(id(parameter), parameter)
                is_whole_here = held is parameter and self._sharding.holds_whole(parameter)
                if (is_whole_here or isinstance(held, DTensor)) and parameter not in in_units:
                    raise InputError(
                        "copy.deepcopy of a part of a sharded model that has weights beside its "
                        "blocks: copy the model, and take that part of the copy, or copy a block"
                    )

    def _gather(self, module: nn.Module, state: StateDict, prefix: str, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            if value is None or value is parameter:
                continue
            value = fsdp.shard_behind(value)
            if isinstance(value, DTensor) and is_whole(value):
                state[prefix + name] = as_numbers(value).to_local()
            elif isinstance(value, DTensor) or self._sharding.holds_whole(parameter):
                state[prefix + name] = self._made(state, parameter, value)

    def _made(self, state: StateDict, parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
        """Return what a state dict has of a parameter, of tied weights the same tensor."""
        if self._state is None or self._state() is not state:
            can_be_known_again = type(state).__weakrefoffset__  # not if the caller gave a dict
            self._state = weakref.ref(state) if can_be_known_again else None
            self._made_of.clear()
            self._of_shard = None
        if (made := self._made_of.get(id(parameter))) is None:
            if isinstance(value, DTensor):
                self._of_shard = self._of_shard or self._agree()
                made = self._of_shard(value)
            else:
                made = value.clone()
            self._made_of[id(parameter)] = made
        return made

    def _agree(self) -> Callable[[DTensor], torch.Tensor]:
        """Return what makes a state dict's tensors of shards; raises InputError unless all ranks
        are about to gather.

        Inside `GatheredParameters` a rank may be alone: it gets what is whole there, and of other
        weights the shards.
        """
        parameters = (each for module in self._modules for each in module.parameters(recurse=False))
        if any(isinstance(each, fsdp.WholeParameter) for each in parameters):
            return lambda shard: shard
        try:
            meet(self._group, "state_dict", LIMIT, later="GatheredParameters")
        except AbsentRanksError as error:
            if error.are_ahead:
                log.warning(
                    "state_dict() on this rank alone: sharded weights are empty in it, as in "
                    "DeepSpeed at stage 3, because the other ranks are in GatheredParameters; take "
                    "them from there, or let all ranks call state_dict()"
                )
                return lambda shard: shard.to_local().new_empty(0)
            raise InputError(
                "state_dict() of a model whose weights are sharded (at ZeRO stage 3, layers that "
                f"ranks split, or before engine.step()) gathers them, and the ranks {error.ranks} "
                f"of {self._group.size()} did not call it within {LIMIT.seconds} s: call it, or "
                "save_pretrained, copy.deepcopy and whatever else calls it, on all ranks, and "
                "write the file on one; between steps at stages 0 to 2 one rank may call it alone"
            ) from error
        return lambda shard: fsdp.gather_whole(as_numbers(shard.detach()))

    def _split(self, module: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
        """Keep this rank's parts of the whole tensors that are being loaded."""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            value = state.get(prefix + name)
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if not is_plain or value.shape != parameter.shape:
                continue
            if isinstance(parameter, DTensor):
                part = part_for_rank(value.detach(), parameter)
                state[prefix + name] = fsdp.shard_like(parameter, part)
            elif self._sharding.holds_whole(parameter):
                self._loading[id(parameter)] = value

    def _load_exactly(self, module: nn.Module, _: Any) -> None:
        """Let the fp32 weights have the values that were loaded, not those rounded to 16 bit."""
        for parameter in module.parameters(recurse=False):
            value = self._loading.pop(id(parameter), None)
            if value is not None and (values := found(parameter)) is not None:
                values.write_weight(value.detach(), whole=True)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with copies of its tensors on `device`; dicts, lists and tuples are copied too.

    Equal views of one storage, such as tied weights, become one tensor (on a rank without elements
    of it, two). Sharded tensors are
    gathered, so all ranks must call this.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, copies: dict[tuple, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        whole = fsdp.gather_whole(item) if isinstance(item, DTensor) else item  # on all ranks alike
        return copies.setdefault(_place(item), whole.detach().to(device, copy=True))
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device, copies)) for key, value in item.items())
    if isinstance(item, list | tuple):
        return type(item)(_clone(value, device, copies) for value in item)
    return item


def _place(tensor: torch.Tensor) -> tuple:
    """What is the same for two tensors only if they are the same memory, seen the same way."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel():
        return (id(tensor),)
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, tensor.stride())
