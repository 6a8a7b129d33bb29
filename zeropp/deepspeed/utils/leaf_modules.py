"""`deepspeed.utils.z3_leaf_module`: modules that ZeRO-3 is to gather as a whole.

DeepSpeed needs them where ranks run different parts of a module. Here a block is
gathered as a whole, and weights without a gradient on some rank get zeros: marks have no effect.
"""

import logging
from collections.abc import Callable, Sequence

from torch import nn

from zeropp.errors import InputError

log = logging.getLogger("zeropp")
Classes = Sequence[type[nn.Module] | str]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes of these names, and return them.

    Raises InputError if there are none, unless `raise_if_not_found` is false.
    """
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Classes, raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of the modules of these classes, and return the modules."""
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module,
    module_names: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
    *,
    fits: Callable[[str, str], bool] = str.__eq__,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of these names in the model; return them, and the names without one.

    `fits` says whether a module's name is, or ends in, one of these.
    """
    named = dict(model.named_modules())
    found = [module for name, module in named.items() if any(fits(name, n) for n in module_names)]
    missing = [one for one in module_names if not any(fits(name, one) for name in named)]
    if missing and raise_if_not_found:
        raise InputError(f"the model has no module named {', '.join(missing)}")
    _set_flags(found, flag)
    return found, missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; return them, and the endings without one."""
    return set_z3_leaf_modules_by_name(
        model, module_name_suffixes, flag, raise_if_not_found, fits=str.endswith
    )


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove its mark."""
    model.z3_leaf = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked."""
    return getattr(model, "z3_leaf", False)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of the model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark_classes(
    model: nn.Module, classes: Classes, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [each for each in model.modules() if any(_is_of_class(each, kind) for kind in classes)]
    if not found and raise_if_not_found:
        raise InputError(f"the model has no module of {', '.join(map(str, classes))}")
    _set_flags(found, flag)
    return found


def _set_flags(modules: Sequence[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)
    if flag and modules:
        log.info(
            "leaf modules have no effect here: a block is gathered as a whole, whichever of its "
            "parts run"
        )


def _is_of_class(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if not isinstance(kind, str):
        return isinstance(module, kind)
    original = type(module)
    return kind in (original.__name__, f"{original.__module__}.{original.__qualname__}")
