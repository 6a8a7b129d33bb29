"""Finds the experts of a model by what they hold and how they are called, not by their class.

transformers holds the experts of a layer in one module:

    gate_up_proj [E, 2F, H] or up_proj [E, F, H], down_proj [E, H, F], perhaps biases [E, ...]
    forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]

with dims in another order in some families. E is also its `num_experts`. Each row depends on its
own experts alone, so that a rank with some of them can compute it.
"""

import inspect

from torch import nn

from zeropp.errors import InputError, first_few

SIZE = "expert_parallel.autoep_size"
_INPUT, _OUTPUT = ("gate_up_proj", "up_proj"), "down_proj"


def find_experts(model: nn.Module, size: int) -> dict[str, nn.Module]:
    """Return the experts of all layers, which `size` ranks can split, by name.

    Those of modules in several places are there several times. Raises InputError if there are none,
    and for those that cannot be split.
    """
    modules = model.named_modules(remove_duplicate=False)
    found = {path: module for path, module in modules if path and _are_experts(module)}
    if not found:
        raise InputError(
            f"{SIZE} = {size}: {type(model).__name__} has no experts that can be split: a module "
            "with parameters gate_up_proj (or up_proj) and down_proj of three dims, of which the "
            "first is its num_experts, and forward(hidden_states, top_k_index, top_k_weights), as "
            "in transformers; for any other layer set 1, and each rank gathers all experts"
        )
    shared: dict[str, None] = {}
    owners: dict[int, str] = {}
    for path, module in found.items():
        for parameter in module.parameters():
            if owners.setdefault(id(parameter), path) != path:
                shared |= dict.fromkeys((owners[id(parameter)], path))
    if shared:
        raise InputError(
            f"{SIZE} = {size}: {first_few([*shared])} share parameters, and tied "
            "experts cannot be split: set 1, and each rank gathers all experts"
        )
    for path, module in found.items():
        _require_splittable(path, module, size)
    return found


def _are_experts(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    size = getattr(module, "num_experts", None)
    names = [name for name in _INPUT if name in own]
    if not names or _OUTPUT not in own or not isinstance(size, int):
        return False
    matrices = [own[name] for name in (*names, _OUTPUT)]
    if any(each.ndim != 3 or each.shape[0] != size for each in matrices):
        return False
    return len(inspect.signature(module.forward).parameters) == 3


def _require_splittable(path: str, module: nn.Module, size: int) -> None:
    """Raise InputError for experts that `size` ranks cannot split, and those that others changed.

    An adapter's layer computes with the weights of a whole layer, and hooks would see the rows of
    other ranks.
    """
    number, what = module.num_experts, f"{SIZE} = {size}: {path}"
    if number % size:
        raise InputError(
            f"{what} has {number} experts: choose a number of ranks that divides those of each "
            "layer"
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if "." in name or tensor.ndim < 2 or tensor.shape[0] != number:
            raise InputError(
                f"{what} has {name} of shape {list(tensor.shape)}, which does not belong to one "
                "expert each: set 1, and each rank gathers all experts"
            )
    if any(True for _ in module.buffers()):
        raise InputError(f"{what} has buffers, which ranks cannot split: set 1")
    if path.rpartition(".")[2] == "base_layer" or hasattr(module, "parametrizations"):
        raise InputError(
            f"{what} has adapters, as PEFT's target_parameters makes them, and these use whole "
            "layers: set 1, or adapt other layers, such as those of attention"
        )
    if any(value for name, value in vars(module).items() if name.endswith("_hooks")):
        raise InputError(
            f"{what} has hooks, which would be called with the rows of other ranks: register them "
            "on the module that is in its place after zeropp.initialize"
        )
