"""`engine.optimizer.quantize_nontrainable_params()`: a sharded model that became LoRA afterwards.

What was added since (adapters) is sharded, block by block, in units of its own; what was frozen
since is stored quantized; the optimizer holds what is trained now, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.config import ZeroConfig
from zeropp.errors import InputError
from zeropp.freshness import forget_when_weights_change
from zeropp.materialize import agree
from zeropp.sharding import Sharding
from zeropp.stages import precision, store_frozen, use_gradient_mean, use_weight_gather


def quantize_nontrainable_params(
    sharding: Sharding, config: ZeroConfig, optimizer: torch.optim.Optimizer, device: torch.device
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
    hold_trained(optimizer, sharding.model)
    return sharding


def adopt(sharding: Sharding, config: ZeroConfig, device: torch.device) -> Sharding:
    """Shard parameters that were put into a sharded model, those of each unit as one more unit."""
    found = [(unit, _new_parts(unit, sharding.units)) for unit in sharding.units]
    added = [(unit, parts) for unit, parts in found if parts]
    if not added:
        return sharding
    if any(fsdp.has_run(unit) for unit in sharding.units):
        raise InputError(
            "there are parameters that were added after the model was first used, and FSDP2 takes "
            "no more then: add adapters before the first forward pass"
        )
    mesh = next(one for one in sharding.model.parameters() if isinstance(one, DTensor)).device_mesh
    policy = precision(config, cast_forward_inputs=True)
    beside: dict[nn.Module, fsdp.FSDPModule] = {}
    for unit, parts in added:
        for part in parts:
            for one in part.parameters(recurse=False):
                one.data = one.data.to(device)
            agree(part, mesh.get_group(), device)
        sharded = [p for part in parts for p in part.parameters() if isinstance(p, DTensor)]
        regather = sharding.stage == 3 and unit is not sharding.model
        fsdp.shard_unit(parts, mesh, policy, reshard_after_forward=regather, ignored=sharded)
        beside[unit] = parts[0]
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
    trained = dict.fromkeys(one for one in model.parameters() if one.requires_grad)
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one not in trained:
                optimizer.state.pop(one, None)
        group["params"] = [one for one in group["params"] if one in trained]
        for one in group["params"]:
            del trained[one]
    optimizer.param_groups[0]["params"] += list(trained)


def _new_parts(unit: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a unit, not of those inside it, that own parameters nobody has sharded."""
    others = {m for one in units if one is not unit and _within(one, unit) for m in one.modules()}
    return [
        module
        for module in unit.modules()
        if module not in others
        and any(not isinstance(p, DTensor) for p in module.parameters(recurse=False))
    ]


def _within(one: nn.Module, other: nn.Module) -> bool:
    return any(one is inside for inside in other.modules())
