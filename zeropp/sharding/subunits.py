"""Parameters of a unit that are gathered separately from it, with modules inside the unit.

Trained parameters beside frozen ones form a unit of their own. The rest of the unit then never
changes, and hpZ keeps it for the whole run. A gather starts with a module's forward pass, so each
parameter is gathered with the innermost called module that uses it.
"""

from collections.abc import Collection

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Subunits = dict[nn.Module, set[nn.Parameter]]  # module -> parameters its forward pass uses


def modules_using(
    parameters: set[nn.Parameter], unit: nn.Module, others: Collection[nn.Module]
) -> Subunits:
    """Return the modules inside `unit`, outside `others`, whose forward passes use `parameters`.

    The unit itself is returned for parameters that no called module inside it uses.
    """
    users: Subunits = {}

    def visit(module: nn.Module, called: nn.Module) -> None:
        called = module if _is_called(module) else called
        if used := parameters.intersection(module.parameters(recurse=False)):
            users.setdefault(called, set()).update(used)
        for child in module.children():
            if child not in others:
                visit(child, called)

    visit(unit, unit)
    return users


def trained_subunits(unit: nn.Module, others: Collection[nn.Module]) -> Subunits:
    """Return where to gather the trained parameters of a unit with frozen ones; {} if all train.

    Parameters that the unit itself uses stay in the unit. Modules in `others` do not belong to it.
    """
    parameters = own_parameters(unit, others)
    trained = {parameter for parameter in parameters if parameter.requires_grad}
    if trained == parameters:
        return {}
    users = modules_using(trained, unit, others)
    staying = users.pop(unit, set())
    return {module: used - staying for module, used in users.items() if used - staying}


def own_parameters(unit: nn.Module, others: Collection[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of a unit's modules that are not in `others`."""
    modules = (module for module in unit.modules() if module not in others)
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _is_called(module: nn.Module) -> bool:
    """Whether a module's forward is called: not so for containers, nor for the output projection
    of `nn.MultiheadAttention`, whose weight is read without calling it."""
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and not isinstance(module, NonDynamicallyQuantizableLinear)
