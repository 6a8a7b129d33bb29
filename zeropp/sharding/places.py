"""Where the parameters of a model are: in which blocks, and which called modules use them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


class Place(NamedTuple):
    """A parameter in a module. One that modules share has several places.

    name: in the whole model.
    unit: the innermost one that contains the module, or the model.
    user: the innermost module of the unit whose forward pass is called and reads the parameter, or
    the unit.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    user: nn.Module
    unit: nn.Module


Places = Iterable[Place]
Parts = Mapping[nn.Parameter, nn.Parameter]  # this rank's part of each that ranks split


def outermost_blocks(module: nn.Module, *, in_list: bool = False) -> Sequence[nn.Module]:
    """Return the entries of the outermost `nn.ModuleList`s that have parameters, in order.

    A block that is listed several times, as in models that share layers, is returned once. Entries
    without a forward pass, such as lists and dicts, count as what is in them.
    """
    blocks: dict[nn.Module, None] = {}
    in_list = in_list or isinstance(module, nn.ModuleList)
    for child in module.children():
        is_block = in_list and is_called(child) and not isinstance(child, nn.ModuleList)
        for block in [child] if is_block else outermost_blocks(child, in_list=in_list):
            if any(True for _ in block.parameters()):
                blocks[block] = None
    return list(blocks)


def places_of(
    model: nn.Module, units: Collection[nn.Module] = (), parts: Parts = MappingProxyType({})
) -> list[Place]:
    """Return the places of all parameters, in the order of `model.parameters()`.

    `units` are modules inside the model. Parameters that have `parts` are taken to be these.
    """
    walk = _walk(model, frozenset(units), user=model, unit=model, prefix="")
    return [each._replace(parameter=parts.get(each.parameter, each.parameter)) for each in walk]


def _walk(
    module: nn.Module,
    units: frozenset[nn.Module],
    *,
    user: nn.Module,
    unit: nn.Module,
    prefix: str,
) -> Iterator[Place]:
    if module in units:
        user = unit = module
    elif is_called(module):
        user = module
    for name, parameter in module.named_parameters(recurse=False):
        yield Place(prefix + name, parameter, module, user, unit)
    for name, child in module.named_children():
        yield from _walk(child, units, user=user, unit=unit, prefix=f"{prefix}{name}.")


def is_called(module: nn.Module) -> bool:
    """Whether a module's forward is called: not so for containers, nor for the output projection
    of `nn.MultiheadAttention`, whose weight is read without calling it."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)
