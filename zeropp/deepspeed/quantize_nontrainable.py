"""`engine.optimizer.quantize_nontrainable_params()`: for LoRA added after sharding.

What was added since (adapters) is sharded, block by block, in units of its own; what was frozen
since is stored quantized; the optimizer holds what is trained now, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.capabilities.mixz.storage import store
from zeropp.deepspeed.engine_optimizer import HALVES
from zeropp.errors import InputError
from zeropp.optim.sharded_optimizer import sharded
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.cut import Place, Subunits, by_unit, by_user, cut, places_of, unit_of
from zeropp.sharding.plan import UnitPlan
from zeropp.sharding.shard import copy_from_first_rank
from zeropp.sharding.sharding import Sharding


def quantize_nontrainable_params(
    sharding: Sharding,
    config: ZeroConfig,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Sharding:
    """Adopt what was added, store what is frozen quantized, and let the optimizer hold the rest.

    New parameters are those of the first rank, everywhere. Raises InputError where nothing is
    frozen, where the model has run already and there are new parameters, and where the
    optimizer holds copies of the weights.
    """
    if config.placement.frozen_bits is None:
        raise InputError(
            "quantize_nontrainable_params() needs zero_optimization."
            "zero_quantized_nontrainable_weights = true in the JSON"
        )
    if why := sharded(optimizer).why_fixed:
        raise InputError(
            f"{why}: freeze and add adapters before zeropp.initialize, which then stores the "
            "frozen weights quantized by itself"
        )
    sharding = store(adopt(sharding, device), config)
    if optimizer is not None:
        hold_trained(optimizer, sharding.model)
    return sharding


def adopt(sharding: Sharding, device: torch.device) -> Sharding:
    """Shard parameters that were added to a sharded model, those of each unit as one more unit."""
    units = sharding.units
    sharded_ids = {id(shard.local) for unit in units for shard in fsdp.own_shards(unit)}
    # Copies of shards, as in PEFT's modules_to_save, were added too, and have other ids.
    added = [
        place
        for place in places_of(sharding.model, units)
        if place.parameter.ndim and id(_local(place.parameter)) not in sharded_ids
    ]
    if not added:
        return sharding
    if any(fsdp.has_run(unit) for unit in units):
        raise InputError(
            "parameters were added after the model was first used, when FSDP2 accepts no more: "
            "add adapters before the first forward pass"
        )
    _require_called(added)
    places = by_unit(added)
    mesh, (root,) = sharding.grid.data, sharding.roots
    planned = dict(zip(units, sharding.plan.units, strict=True))
    all_units: dict[fsdp.FSDPModule, UnitPlan] = {}
    for unit in units:
        all_units[unit] = planned[unit]
        if unit in places:
            like = replace(planned[unit], dtype=sharding.compute_dtype)
            users = by_user(places[unit], {place.parameter for place in places[unit]})
            all_units |= _adopt_into(like, users, mesh, device)
    all_units[root.model] = all_units.pop(root.model)  # last
    new = [unit for unit in all_units if unit not in planned]
    root.add(new, [all_units[unit] for unit in new])
    root.order([*all_units])
    return replace(sharding, plan=replace(sharding.plan, units=tuple(all_units.values())))


def _adopt_into(
    plan: UnitPlan,
    added: Subunits,
    mesh: DeviceMesh,
    device: torch.device,
) -> dict[fsdp.FSDPModule, UnitPlan]:
    """Make one more unit of what was added to the planned one; return it and its plan."""
    plain = _unshard_added(added, device)
    for module in added:
        copy_from_first_rank(module, mesh.get_group(), device)
    like = replace(plan, is_root=False, is_apart=True, casts_inputs=True)
    adopted = unit_of(like, added, plain.values())
    (module,) = cut([adopted])
    return {module: replace(adopted, parameters=())}


def hold_trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Update the optimizer's groups: drop frozen parameters, add new ones to the first."""
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    without_group = dict.fromkeys(names)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                optimizer.state.pop(parameter, None)
        group["params"] = [parameter for parameter in group["params"] if parameter in names]
        for parameter in group["params"]:
            del without_group[parameter]
    for parameter in without_group:
        if parameter.dtype in HALVES:
            raise InputError(
                f"{names[parameter]} is {parameter.dtype}: it was frozen when zeropp.initialize "
                "got the model, and was unfrozen since, without an fp32 weight to train; leave it "
                "trainable until then and freeze it afterwards"
            )
    optimizer.param_groups[0]["params"] += list(without_group)
    for group in optimizer.param_groups:
        if "param_names" in group:
            group["param_names"] = [names[parameter] for parameter in group["params"]]


def _require_called(added: Sequence[Place]) -> None:
    """Raise InputError naming a parameter that no module inside its unit uses when called."""
    for place in added:
        if place.user is place.unit:
            raise InputError(
                f"{place.name} was added to a model that is sharded already, outside of any "
                "module that is called, so nothing would gather it: put it into a module of its "
                "own within its block, or add it before zeropp.initialize"
            )


def _unshard_added(added: Subunits, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Make the added parameters plain tensors on the device; return them by what they were."""
    plain: dict[nn.Parameter, nn.Parameter] = {}
    parameters = set().union(*added.values())
    for module in dict.fromkeys(each for user in added for each in user.modules()):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in tuple(own):
            if parameter in parameters:
                if parameter not in plain:
                    plain[parameter] = _plain(parameter, device)
                module.register_parameter(name, plain[parameter])
    return plain


def _plain(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter as a plain tensor; a copy of a shard, as in modules_to_save, gathered."""
    if not isinstance(parameter, DTensor):
        parameter.data = _trained_in_fp32(parameter.data, parameter).to(device)
        return parameter
    full = _trained_in_fp32(fsdp.gather_whole(parameter.detach()), parameter)
    whole = nn.Parameter(full, requires_grad=parameter.requires_grad)
    fsdp.inherit(whole, parameter)
    return whole


def _trained_in_fp32(values: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    is_trained_half = parameter.requires_grad and values.dtype in HALVES
    return values.float() if is_trained_half else values


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter
