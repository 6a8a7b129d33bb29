"""Which modules inside a unit are gathered apart from it, for a part of its parameters.

Trained parameters beside frozen ones make a unit of their own, so that a unit whose weights never
change is left, and hpZ keeps that for the whole run. A gather begins with a module's forward pass:
parameters are gathered with the innermost module that is called and uses them.
"""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Subunits = dict[nn.Module, set[nn.Parameter]]  # a module, and parameters that its forward pass uses


def users(unit: nn.Module, others: Collection[nn.Module], wanted: set[nn.Parameter]) -> Subunits:
    """The modules inside a unit, outside `others`, whose forward passes use `wanted`.

    The unit itself is among them where nothing inside it that is called uses a parameter.
    """
    found: Subunits = {}

    def visit(module: nn.Module, called: nn.Module) -> None:
        called = module if _is_called(module) else called
        if used := wanted.intersection(module.parameters(recurse=False)):
            found.setdefault(called, set()).update(used)
        for child in module.children():
            if child not in others:
                visit(child, called)

    visit(unit, unit)
    return found


def trained_subunits(unit: nn.Module, others: Collection[nn.Module]) -> Subunits:
    """Where trained parameters of a unit, outside `others`, can be gathered, if some are frozen.

    Those that the unit itself uses stay in it.
    """
    owners = [module for module in unit.modules() if module not in others]
    own = {one for module in owners for one in module.parameters(recurse=False)}
    trained = {one for one in own if one.requires_grad}
    if trained == own:
        return {}
    apart = users(unit, others, trained)
    staying = apart.pop(unit, set())
    return {module: used - staying for module, used in apart.items() if used - staying}


def _is_called(module: nn.Module) -> bool:
    """Containers are not, nor the last layer of `nn.MultiheadAttention`, which only reads it."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)
