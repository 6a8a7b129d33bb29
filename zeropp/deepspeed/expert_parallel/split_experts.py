"""Finds the experts of a model by what they hold and how they are called; lets ranks split them.

transformers holds the experts of a layer in one module:

    gate_up_proj [E, 2F, H] or up_proj [E, F, H], down_proj [E, H, F], perhaps biases [E, ...]
    forward(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]

with dims in another order in some families. E is also its `num_experts`. Each row depends on its
own experts alone, so that a rank with some of them can compute it.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp.deepspeed.expert_parallel.layer import ExpertParallel, ExpertRanks
from zeropp.errors import InputError, Unavailable, first_few
from zeropp.ranks.groups import shared_group
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.grid import inherit_time_limits, own_ranks_per_node, ranks_of
from zeropp.wire.rank_group import Nodes, RankGroup
from zeropp.wire.traffic import Traffic

AXIS_NAMES = ("expert_data", "expert")
SIZE = "expert_parallel.autoep_size"
_INPUT, _OUTPUT = ("gate_up_proj", "up_proj"), "down_proj"


def split(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    config: ZeroConfig,
    ledger: Traffic,
) -> dict[nn.Module, DeviceMesh]:
    """Put a layer of split experts in the place of each of those found; return their meshes.

    Consecutive ranks of the data axis `mesh` split them: `zeropp.shard` keeps this rank's part of
    the parameters. `ledger` gets the bytes of the tokens that this rank sends.
    """
    if not found:
        return {}
    size, ranks = config.expert_ranks, ranks_of(mesh)
    place = mesh.get_local_rank()
    lines = {
        "expert_data": ranks[place % size :: size],
        "expert": ranks[place // size * size :][:size],
    }
    grid = DeviceMesh.from_group(
        [shared_group(name, lines[name], ranks) for name in AXIS_NAMES],
        mesh.device_type,
        mesh=mesh.mesh.view(-1, size),
        mesh_dim_names=AXIS_NAMES,
    )
    inherit_time_limits(grid)
    world = dist.get_world_size()
    group = RankGroup(
        members=tuple(lines["expert"]),
        position=dist.get_rank(),
        nodes=Nodes(num_ranks=world, ranks_per_node=own_ranks_per_node(config)),
        purpose="expert",
        ledger=ledger,
        group=grid.get_group("expert"),
    )
    layers = {path: ExpertParallel(experts, ExpertRanks(group)) for path, experts in found.items()}
    for path, layer in layers.items():
        model.set_submodule(path, layer)
    return dict.fromkeys(layers.values(), grid)


def experts_to_split(
    model: nn.Module, mesh: DeviceMesh, config: ZeroConfig
) -> dict[str, nn.Module]:
    """Return the experts of a model's layers if ranks are to split them; changes nothing.

    Raises InputError unless equal groups of ranks of the data axis `mesh`, in nodes or of nodes,
    can.
    """
    if config.expert_ranks == 1:
        return {}
    size, per_node = config.expert_ranks, own_ranks_per_node(config)
    if mesh.size() % size:
        raise InputError(
            f"{SIZE} = {size} and {mesh.size()} ranks: choose a number that divides the ranks"
        )
    if per_node % size and size % per_node:
        raise InputError(
            f"{SIZE} = {size} and {per_node} ranks per node: some experts would be split in a node "
            "and others across two; choose a number that divides the ranks of a node, or a "
            "multiple of these"
        )
    return find_experts(model, size)


def describe(layers: Collection[ExpertParallel]) -> Iterator[str]:
    """Yield the line that says which ranks split how many experts, if any do."""
    if not layers:
        return
    group = next(iter(layers)).ranks.group
    experts = " or ".join(map(str, sorted({each.num_experts for each in layers})))
    yield (
        f"experts: {group.size} ranks {group.where} split the {experts} experts of each of "
        f"{len(layers)} layers, and send each other tokens in the format of computing"
    )


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


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | list | tuple, max_group_size: float | None = None
) -> list[Mapping[str, Any]]:
    """Return the groups as a list. Raises InputError for parameters of DeepSpeed's own experts."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else [*param_groups]
    if not all(getattr(each, "allreduce", True) for group in groups for each in group["params"]):
        raise Unavailable("experts of DeepSpeed's class MoE are not available here: see AutoEP")
    return groups
