"""Modules whose parameters have a mesh of their own: other ranks split and shard them, as experts.

The mesh has two axes: the ranks that share a part, over which it is sharded, and those that split
the parameters in the first dim.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.settings.zero_config import ZeroConfig

Parts = Mapping[nn.Parameter, nn.Parameter]  # this rank's part of each that ranks split


def parts_of(meshes: Mapping[nn.Module, DeviceMesh]) -> Parts:
    """Return this rank's part of each whole parameter of these modules, a DTensor.

    The first dim is split evenly over the last axis of the module's mesh. Raises InputError for one
    that cannot be.
    """
    _require_divisible(meshes)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module, mesh in meshes.items():
        axis = mesh[mesh.mesh_dim_names[-1]]
        for whole in module.parameters():
            if not isinstance(whole, DTensor) and whole not in parts:
                local = whole.detach().chunk(axis.size())[axis.get_local_rank()].clone()
                part = DTensor.from_local(local, axis, [Shard(0)], run_check=False)
                parts[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
                fsdp.inherit(parts[whole], whole)
    return parts


def replace_by_parts(modules: Iterable[nn.Module], parts: Parts) -> None:
    """Let each rank keep its part of the whole parameters of these modules, in place."""
    for module in modules:
        for owner in module.modules():
            for name, parameter in tuple(owner.named_parameters(recurse=False)):
                if parameter in parts:
                    owner.register_parameter(name, parts[parameter])


def require_apart(
    meshes: Mapping[nn.Module, DeviceMesh],
    parts: Parts,
    blocks: Sequence[nn.Module],
    data: DeviceMesh,
    config: ZeroConfig,
) -> None:
    """Raise InputError for modules on meshes of their own that cannot be units inside `blocks`.

    And for none, where the configuration splits some. `parts` are those of their parameters.
    """
    if config.expert_ranks > 1 and not meshes:
        raise InputError(
            f"expert_parallel.autoep_size = {config.expert_ranks}: zeropp.shard replaces no layers "
            "of a model; give the model to zeropp.initialize, which does, or leave it out and give "
            "experts="
        )
    inside = {module for block in blocks for module in block.modules()}.difference(blocks)
    ranks = data.mesh.flatten().tolist()
    for module, mesh in meshes.items():
        what = _own(module)
        if module not in inside:
            raise InputError(f"{what} is not inside a unit: give modules inside those of units=")
        if not {*ranks} <= {*mesh.mesh.flatten().tolist()} or mesh.size() % len(ranks):
            raise InputError(
                f"{what} has a mesh of the ranks {mesh.mesh.tolist()}, and the data axis has "
                f"{ranks}: both must be of the same ranks"
            )
        if not {*mesh.mesh[:, mesh.get_local_rank(1)].tolist()} <= {*ranks}:
            raise InputError(
                f"{what}: its ranks with the same experts must all be ranks of the data axis, "
                f"{ranks}: let ranks with consecutive numbers split the experts"
            )
        last = mesh.mesh_dim_names[-1]
        for name, parameter in module.named_parameters():
            part = parts.get(parameter, parameter)
            if not isinstance(part, DTensor) or part.device_mesh != mesh[last]:
                raise InputError(
                    f"{what}: its {name} is not split over {last!r}: it must be a DTensor on that "
                    "axis of the experts' mesh"
                )


def _require_divisible(meshes: Mapping[nn.Module, DeviceMesh]) -> None:
    for module, mesh in meshes.items():
        if mesh.ndim != 2 or not mesh.mesh_dim_names:
            raise InputError(
                f"{_own(module)} has a mesh of {mesh.ndim} axes: expected two axes with names, of "
                "the ranks that share each expert and of those that split the experts"
            )
    for module, mesh in meshes.items():
        size = mesh.size(1)
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                shape = parameter.shape
                if not isinstance(parameter, DTensor) and (not shape or shape[0] % size):
                    raise InputError(
                        f"experts= of zeropp.shard: {type(module).__name__}.{name} has the shape "
                        f"{list(shape)}, and {size} ranks split its first dim evenly: choose a "
                        "number of ranks that divides it"
                    )


def _own(module: nn.Module) -> str:
    return f"experts= of zeropp.shard: a {type(module).__name__}"
