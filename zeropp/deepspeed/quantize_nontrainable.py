"""`engine.optimizer.quantize_nontrainable_params()`: a sharded model that became LoRA afterwards.

What was added since (adapters) is sharded, block by block, in units of its own; what was frozen
since is stored quantized; the optimizer holds what is trained now, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.materialize import copy_from_first_rank
from zeropp.sharding.shard import (
    precision,
    shard_subunits,
    store_frozen,
    use_gradient_mean,
    use_weight_gather,
)
from zeropp.sharding.sharding import Sharding
from zeropp.sharding.subunits import Subunits, users
from zeropp.sharding.weight_changes import forget_when_weights_change


def quantize_nontrainable_params(
    sharding: Sharding,
    config: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Sharding:
    """Adopt what was added, store what is frozen quantized, and let the optimizer hold the rest.

    New parameters are those of the first rank, everywhere. Raises InputError where nothing is
    frozen, where the model has run already and there are new parameters, and with offload.
    """
    if not config.stores_frozen:
        raise InputError(
            "quantize_nontrainable_params() needs zero_optimization."
            "zero_quantized_nontrainable_weights = true in the JSON"
        )
    if config.offloads_optimizer:
        raise InputError(
            "an offloaded optimizer holds its own copies of the weights: freeze and add adapters "
            "before zeropp.initialize, which then stores the frozen weights quantized by itself"
        )
    sharding = store_frozen(adopt(sharding, config, device), config)
    if optimizer is not None:
        hold_trained(optimizer, sharding.model)
    return sharding


def adopt(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Shard parameters that were put into a sharded model, those of each unit as one more unit."""
    units = sharding.units
    known = {id(one.local) for unit in units for one in fsdp.own_shards(unit)}
    added = {unit: apart for unit in units if (apart := _added(unit, units, known))}
    if not added:
        return sharding
    if any(fsdp.has_run(unit) for unit in units):
        raise InputError(
            "there are parameters that were added after the model was first used, and FSDP2 takes "
            "no more then: add adapters before the first forward pass"
        )
    _require_called(sharding.model, added)
    mesh = next(one for one in sharding.model.parameters() if isinstance(one, DTensor)).device_mesh
    policy = precision(config, cast_forward_inputs=True)
    beside: dict[nn.Module, fsdp.FSDPModule] = {}
    for unit, apart in added.items():
        added_here = set().union(*apart.values())
        for part in apart:
            _make_whole(part, added_here, device)
            copy_from_first_rank(part, mesh.get_group(), device)
        regather = sharding.stage == 3 and unit is not sharding.model
        (beside[unit],) = shard_subunits(
            apart, mesh=mesh, precision=policy, reshard_after_forward=regather
        )
    new, units = tuple(beside.values()), []
    for unit in sharding.units:
        extra = [beside[unit]] if unit in beside else []
        units += [*extra, unit] if unit is sharding.model else [unit, *extra]
    forget_when_weights_change(sharding.model, new, sharding.copies)
    if sharding.num_ranks > 1:
        if mesh.device_type == "cpu" and len(units) > 1:
            fsdp.gather_ahead(sharding.model, units[:-1])
        forecast = sharding.forecast
        use_weight_gather(new, mesh, forecast.weights, sharding.traffic, sharding.copies)
        use_gradient_mean(new, mesh, forecast.gradients, sharding.traffic, forecast.wire_dtype)
    return replace(sharding, units=tuple(units))


def hold_trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let the optimizer's groups hold the trained parameters: frozen ones leave with their state,
    new ones join the first group."""
    names = {one: name for name, one in model.named_parameters() if one.requires_grad}
    waiting = dict.fromkeys(names)
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one not in names:
                optimizer.state.pop(one, None)
        group["params"] = [one for one in group["params"] if one in names]
        for one in group["params"]:
            del waiting[one]
    optimizer.param_groups[0]["params"] += list(waiting)
    for group in optimizer.param_groups:
        if "param_names" in group:
            group["param_names"] = [names[one] for one in group["params"]]


def _added(unit: nn.Module, units: Sequence[nn.Module], known: set[int]) -> Subunits:
    """The parameters of a unit, not of those inside it, that nobody has sharded, and their users.

    `known` are the ids of shards; copies of these, as PEFT's modules_to_save, were added too.
    """
    others = {m for one in units if one is not unit and _within(one, unit) for m in one.modules()}
    owners = [module for module in unit.modules() if module not in others]
    own = {one for module in owners for one in module.parameters(recurse=False)}
    return users(unit, others, {one for one in own if id(_local(one)) not in known})


def _require_called(model: nn.Module, added: Mapping[nn.Module, Subunits]) -> None:
    """Raise InputError naming a parameter that no module inside its unit uses when called."""
    names = {one: name for name, one in model.named_parameters()}
    for unit, apart in added.items():
        for one in apart.get(unit, ()):
            raise InputError(
                f"{names[one]} was added to a model that is sharded already, and not in a module "
                "that is called, so nothing would gather it: put it into a module of its own "
                "within its block, or add it before zeropp.initialize"
            )


def _make_whole(part: nn.Module, added: set[nn.Parameter], device: torch.device) -> None:
    """Let parameters that were added be plain tensors on the device, copies of shards too."""
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for module in part.modules():
        for name, one in tuple(module.named_parameters(recurse=False, remove_duplicate=False)):
            if one in added and isinstance(one, DTensor):
                if one not in wholes:
                    whole = one.detach().full_tensor()
                    wholes[one] = nn.Parameter(whole, requires_grad=one.requires_grad)
                setattr(module, name, wholes[one])
            elif one in added:
                one.data = one.data.to(device)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _within(one: nn.Module, other: nn.Module) -> bool:
    return any(one is inside for inside in other.modules())
