"""A model and its optimizer as one flat dict of named tensors, and back.

    model.<parameter>                      DTensor or tensor, as the model holds it
    optimizer.<parameter>.<exp_avg ...>    the same, or a scalar such as `step`
    local.<parameter>.<state>              the optimizer's, as tensors of this rank's shard alone
    plain.<parameter>.<state>              the optimizer's, of any shape, not sharded
    number.<parameter>.<state>             the optimizer's, as a number of Python
    behind.<parameter>                     the model's, where masters are one update ahead

and what `kept_codes.py` adds.

Names are those of the plain model, without the wrappers for compilation and recomputation. The
optimizer's settings (learning rate, betas) are not saved here: they come from the configuration.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.checkpoint.kept_codes import codes_to_load, without_codes
from zeropp.checkpoint.rank_values import LOCAL, PLAIN, names_for_rank, without_rank
from zeropp.checkpoint.shard_files import read_shards, saved_tensors
from zeropp.errors import InputError, first_few
from zeropp.optim.sharded_optimizer import sharded
from zeropp.ranks.coordination import fail_together
from zeropp.wire.quantized_shard import is_quantized

MODEL, OPTIMIZER, NUMBER, BEHIND = "model.", "optimizer.", "number.", "behind."
_OPTIMIZERS = (OPTIMIZER, LOCAL, PLAIN, NUMBER)  # what the optimizer's names begin with
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def state_to_save(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, with_optimizer_state: bool = True
) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name; they share the model's and optimizer's memory.

    Without `with_optimizer_state`, only the fp32 weights that the optimizer may hold come from it.
    """
    tensors = model_tensors(model, optimizer)
    if optimizer is not None and with_optimizer_state:
        tensors |= _optimizer_tensors(model, optimizer)
        tensors |= _delayed_weights(model, optimizer)
    return tensors


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    check: Callable[[list[str]], None],
    with_optimizer_state: bool,
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Read the checkpoint in `folder` into model and optimizer, in place; all ranks call it.

    Also into `others`, those of its further tensors that it has.

    Gathered weights must have been dropped before, by `Sharding.weights_changed`.

    `check` is called with the differences between the model's tensors and the checkpoint's in name
    and shape, before anything is changed. If it does not raise, the tensors that fit are loaded.
    """
    with fail_together():
        with_codes = saved_tensors(folder)
        everything = without_codes(with_codes)
        if not with_optimizer_state:
            everything = {
                name: tensor
                for name, tensor in everything.items()
                if without_rank(name).startswith(MODEL)
            }
        names = names_for_rank(everything, exact=MODEL)
        saved = {name: everything[saved_name] for name, saved_name in names.items()}
        weights = model_tensors(model, optimizer)
        elsewhere = names_elsewhere(model)
        differences = shape_differences(model_part(weights), model_part(saved), elsewhere)
        check(differences)
        weights = {
            name: weight
            for name, weight in weights.items()
            if name in saved and saved[name].shape == weight.shape
        }
        optimizer_state, delayed = {}, {}
        if with_optimizer_state:
            optimizer_state = _empty_optimizer_tensors(model, optimizer, saved)
            delayed = _delayed_weights(model, optimizer)
            delayed = {name: weight for name, weight in delayed.items() if name in saved}
        obstacle = "are of a model with other tensors than this run's" if differences else None
        codes = codes_to_load(model, with_codes, obstacle=obstacle)
    others = {name: tensor for name, tensor in others.items() if name in saved}
    tensors = {**weights, **optimizer_state, **delayed, **others}
    read_shards(folder, codes.tensors | {names[name]: tensor for name, tensor in tensors.items()})
    codes.restore()
    if with_optimizer_state:
        _restore_optimizer(model, optimizer, optimizer_state)
    if sharded(optimizer).masters:
        optimizer.loaded(behind=bool(delayed))


def model_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """Return the model's parameters and persistent buffers; they share its memory.

    Parameters of a sharded model that are gathered are freed first, so that shards are returned.
    A parameter whose fp32 master the optimizer holds is represented by that. Frozen weights that
    are stored quantized are left out: they are loaded from where they came from.
    """
    masters = sharded(optimizer).masters
    state = {
        _plain_name(name): value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict(keep_vars=True).items()  # as the model holds them
        if not is_quantized(value)
    }
    for name, parameter in model.named_parameters():
        if parameter in masters:
            state[_plain_name(name)] = masters[parameter].detach()
    names = [_plain_name(name) for name, _ in model.named_parameters()]  # tied ones once
    names += [_plain_name(name) for name, _ in model.named_buffers()]
    return {MODEL + name: state[name] for name in names if name in state}


def without_frozen(
    tensors: Mapping[str, torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Return the tensors without those of the model's frozen parameters."""
    frozen = {MODEL + name for name in frozen_names(model)}
    return {name: tensor for name, tensor in tensors.items() if name not in frozen}


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that do not require gradients."""
    named = model.named_parameters()
    return [_plain_name(name) for name, each in named if not each.requires_grad]


def stored_quantized(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are stored quantized, and not saved."""
    return [_plain_name(name) for name, each in model.named_parameters() if is_quantized(each)]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the further names of parameters and buffers that have several -> the saved one."""
    tied: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first: dict[torch.Tensor, str] = {}
        for name, tensor in named(remove_duplicate=False):
            plain = _plain_name(name)
            if first.setdefault(tensor, plain) != plain:
                tied[plain] = first[tensor]
    return tied


def _delayed_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Return the weights of a model that computes with the weights before the last update.

    They share the model's memory. Empty unless the optimizer delays its updates.
    """
    masters = sharded(optimizer).masters
    if not sharded(optimizer).is_delayed:
        return {}
    return {
        BEHIND + _plain_name(name): parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter in masters
    }


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Return the optimizer's state tensors by name; they share its memory, plain numbers do not.

    `model_tensors` must have been called since the last forward pass. The dict is empty before
    the first step.
    """
    sharded(optimizer).settle()
    tensors = {}
    for name, parameter in _optimized_parameters(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                kind, tensor = _as_saved(value, parameter, f"{type(optimizer).__name__}'s {key}")
                tensors[f"{kind}{name}.{key}"] = tensor
    return tensors


def _as_saved(value: Any, parameter: torch.Tensor, what: str) -> tuple[str, torch.Tensor]:
    """Return how a name of this kind of state begins, and the tensor to save."""
    if isinstance(value, bool | int | float):
        return NUMBER, torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"{what} is a {type(value).__name__}: of an optimizer's state only tensors and numbers "
            "can be saved"
        )
    is_sharded = isinstance(parameter, DTensor) and not isinstance(value, DTensor)
    if not is_sharded or not value.ndim:
        return OPTIMIZER, value
    if value.shape == parameter.to_local().shape:
        return LOCAL, fsdp.shard_like(parameter, value)
    return PLAIN, value


def _empty_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return zeros for each state tensor that a checkpoint holds of this optimizer's parameters.

    A tensor of its parameter's shape is sharded like it; scalars are CPU tensors.
    """
    names = _state_names(saved)
    tensors = {}
    for name, parameter in _optimized_parameters(model, optimizer).items():
        for saved_name in names.get(name, {}).values():
            entry = saved[saved_name]
            if entry.shape == parameter.shape and saved_name.startswith((OPTIMIZER, LOCAL)):
                value = torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
            else:
                value = torch.zeros(entry.shape, dtype=entry.dtype)
            tensors[saved_name] = value
    return tensors


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Make these tensors the optimizer's state; its settings stay as they are."""
    names = _state_names(tensors)
    state = {
        index: {key: _as_held(each, tensors[each]) for key, each in names[name].items()}
        for index, name in enumerate(_optimized_parameters(model, optimizer))
        if name in names
    }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _as_held(saved_name: str, tensor: torch.Tensor) -> Any:
    """Return what the optimizer held when it saved this tensor."""
    if saved_name.startswith(NUMBER):
        return tensor.item()
    is_local = saved_name.startswith(LOCAL) and isinstance(tensor, DTensor)
    return tensor.to_local() if is_local else tensor


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that only other ranks hold, such as other pipeline stages.

    A model that is a part of another one has them as its attribute `names_elsewhere`.
    """
    return getattr(model, "names_elsewhere", frozenset())


def shape_differences(
    weights: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    elsewhere: Collection[str] = (),
) -> list[str]:
    """Describe how the model's tensors differ from a checkpoint's in name and shape; [] if not.

    `elsewhere` are names that the model need not have, because other ranks have them.
    """
    lines = [
        f"{name} has shape {list(saved[name].shape)} in the checkpoint, "
        f"{list(weight.shape)} in the model"
        for name, weight in weights.items()
        if name in saved and weight.shape != saved[name].shape
    ]
    missing = [name for name in weights if name not in saved]
    extra = [name for name in saved if name not in weights and name not in elsewhere]
    if missing:
        lines.append(f"only in the model: {first_few(missing)}")
    if extra:
        lines.append(f"only in the checkpoint: {first_few(extra)}")
    return lines


def model_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's tensors by the names that the model gives them."""
    return {
        name.removeprefix(MODEL): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL)
    }


def _state_names(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of optimizer state, by the parameter's name, then by the state's name."""
    grouped: dict[str, dict[str, str]] = {}
    for name in names:
        if name.startswith(_OPTIMIZERS):
            _, _, rest = name.partition(".")
            parameter_name, _, key = rest.rpartition(".")
            grouped.setdefault(parameter_name, {})[key] = name
    return grouped


def _optimized_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer holds, maybe fp32 masters, by name and in its order."""
    masters = sharded(optimizer).masters
    names = {
        masters.get(parameter, parameter): _plain_name(name)
        for name, parameter in model.named_parameters()
    }
    return {
        names[parameter]: parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
