"""A model and its optimizer as one flat dict of tensors with lasting names, and back.

    model.<parameter>                      DTensor or tensor, as the model holds it
    optimizer.<parameter>.<exp_avg ...>    the same, or a scalar such as `step`
    behind.<parameter>                     what is computed with, one update behind `model`

Names are those of the bare model: wrappers for compilation and recomputation leave no trace. The
optimizer's settings (learning rate, betas) are not state: they come from the configuration.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zeropp.wire.frozen_weights import is_quantized

MODEL, OPTIMIZER, BEHIND = "model.", "optimizer.", "behind."
Masters = Mapping[nn.Parameter, nn.Parameter]  # a model's parameter -> the optimizer's, of fp32
NONE: Masters = MappingProxyType({})
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def model_tensors(model: nn.Module, masters: Masters = NONE) -> dict[str, torch.Tensor]:
    """Return the model's parameters and persistent buffers; they share its memory.

    Gathered parameters of a sharded model are freed first, so shards are what is returned; of those
    with fp32 `masters` elsewhere, these. Frozen weights that are stored quantized are left out:
    they are where they came from.
    """
    state = {_bare(name): v for name, v in model.state_dict().items() if not is_quantized(v)}
    for name, parameter in model.named_parameters():
        if parameter in masters:
            state[_bare(name)] = masters[parameter].detach()
    owned = [_bare(name) for name, _ in model.named_parameters()]  # tied ones once
    owned += [_bare(name) for name, _ in model.named_buffers()]
    return {MODEL + name: state[name] for name in owned if name in state}


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's parameters and state be what its last step makes of them."""
    if hasattr(optimizer, "settle"):
        optimizer.settle()


def masters_of(optimizer: torch.optim.Optimizer | None) -> Masters:
    """What the optimizer holds in the places of the model's parameters, if it does."""
    return getattr(optimizer, "masters", NONE)


def tensors_behind(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, saved: Metadata | None = None
) -> dict[str, torch.Tensor]:
    """Return the weights of a model that computes with those of one update before (they share
    its memory); with `saved`, those that this checkpoint has.
    """
    if not getattr(optimizer, "is_delayed", False):
        return {}
    masters = masters_of(optimizer)
    owned = {
        BEHIND + _bare(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter in masters
    }
    return {n: own for n, own in owned.items() if saved is None or n in saved.state_dict_metadata}


def masters_loaded(optimizer: torch.optim.Optimizer | None, *, behind: bool) -> None:
    """Tell an optimizer that what it holds in the parameters' places has been read from a file.

    behind: so was what the model computes with until the next step, else it follows now.
    """
    if masters_of(optimizer):
        optimizer.loaded(behind=behind)


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the optimizer's state tensors by name; they share its memory, plain numbers do not.

    `model_tensors` must have been called since the last forward pass. The dict is empty before
    the first step.
    """
    settle(optimizer)
    names = _parameter_names(model, optimizer)
    tensors = {}
    for parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{names[parameter]}.{key}"
            if value is not None:
                tensors[name] = value if torch.is_tensor(value) else torch.tensor(value)
    return tensors


def empty_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Metadata
) -> dict[str, torch.Tensor]:
    """Return zeros for each state tensor that a checkpoint holds of this optimizer's parameters.

    What has its parameter's shape is sharded like it; scalars are CPU tensors.
    """
    keys = {}
    for name, facts in saved.state_dict_metadata.items():
        if name.startswith(OPTIMIZER):
            parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
            keys.setdefault(parameter_name, {})[key] = facts
    names = _parameter_names(model, optimizer)
    tensors = {}
    for parameter in _parameters(optimizer):
        for key, facts in keys.get(names[parameter], {}).items():
            dtype = facts.properties.dtype
            if facts.size == parameter.shape:
                value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(facts.size, dtype=dtype)
            tensors[f"{OPTIMIZER}{names[parameter]}.{key}"] = value
    return tensors


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make these tensors the optimizer's state; its settings stay as they are."""
    names = _parameter_names(model, optimizer)
    by_parameter = {}
    for name, value in tensors.items():
        parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        by_parameter.setdefault(parameter_name, {})[key] = value
    state = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        if entries := by_parameter.get(names[parameter]):
            state[index] = entries
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def shape_differences(model: Mapping[str, torch.Tensor], saved: Metadata) -> list[str]:
    """Say how the model's tensors differ from a checkpoint's in name and shape; [] if not."""
    there = {
        name.removeprefix(MODEL): tuple(facts.size)
        for name, facts in saved.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(facts, TensorStorageMetadata)
    }
    here = {name.removeprefix(MODEL): tuple(value.shape) for name, value in model.items()}
    lines = [
        f"{name} has shape {list(there[name])} in the checkpoint, {list(here[name])} in the model"
        for name in here
        if name in there and here[name] != there[name]
    ]
    missing = [name for name in here if name not in there]
    extra = [name for name in there if name not in here]
    if missing:
        lines.append(f"only in the model: {few(missing)}")
    if extra:
        lines.append(f"only in the checkpoint: {few(extra)}")
    return lines


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of whole tensors, of which this rank may hold shards."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def few(names: list[str], most: int = 6) -> str:
    """Return the first names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, str]:
    masters = masters_of(optimizer)
    return {masters.get(own, own): _bare(name) for name, own in model.named_parameters()}


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
