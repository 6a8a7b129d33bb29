"""The model with experts, sharded by FSDP2 as other libraries do it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as common
from torch.distributed.tensor import Shard

from tests.zeropp.sharding.expert_model import ExpertModel

HAS_GROUPS = hasattr(common, "ShardPlacementResult")  # not in torch 2.11
NO_GROUPS = "a unit of this torch has one mesh"
LAYOUTS = ("torchtitan", "torchtitan, columns", "one unit", "transformers")


def sharded_experts(
    layout: str,
    size: int = 2,
    *,
    replicas: int = 1,
    num_experts: int = 8,
    num_blocks: int = 2,
    reshards: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> FSDPModule:
    """The model, whose experts `size` consecutive ranks split, sharded as `layout` does.

    With `replicas` its shards are replicated, as with HSDP.
    """
    shape, names = (replicas, dist.get_world_size() // replicas), ("replica", "data")
    data = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shape, names = (replicas, shape[1] // size, size), ("replica", "expert_data", "expert")
    experts = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = ExpertModel(num_experts, experts["expert_data", "expert"], num_blocks)
    outer = ("replica",) * (replicas > 1)
    data, experts = data[(*outer, "data")], experts[(*outer, "expert_data")]
    options = {"mp_policy": mp_policy or MixedPrecisionPolicy(), "reshard_after_forward": reshards}
    if layout == "transformers":
        _as_transformers(model, data, experts, options)
    else:
        options["dim"] = 1 if layout == "torchtitan, columns" else 0
        blocks = [] if layout == "one unit" else model.blocks
        _as_torchtitan(model, blocks, data, experts, **options)
    return model


def _as_torchtitan(
    model: ExpertModel,
    blocks: Iterable[nn.Module],
    data: DeviceMesh,
    experts: DeviceMesh,
    *,
    dim: int,
    **options: object,
) -> None:
    """Each block, and the model, is one unit; experts in it are on the second of two meshes."""
    dense, sparse = (
        common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for mesh in (data, experts)
    )
    of_experts = {each for module in model.experts for each in module.parameters()}

    def place(parameter: nn.Parameter) -> object:
        if parameter in of_experts:
            return common.ShardPlacementResult(Shard(dim), sparse)
        return common.ShardPlacementResult(Shard(0), dense)

    for unit in (*blocks, model):
        fully_shard(unit, mesh=data, shard_placement_fn=place, **options)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(float(data.size()))
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply by a factor


def _as_transformers(
    model: ExpertModel, data: DeviceMesh, experts: DeviceMesh, options: dict
) -> None:
    """The experts of a block are a unit of their own, with a factor of its own."""
    for module in model.experts:
        fully_shard(module, mesh=experts, **options)
        module.set_gradient_divide_factor(float(data.size()))
        if experts.size(-1) > 1:  # FSDP2 calls no collective for one rank, and would divide twice
            module.set_force_sum_reduction_for_comms(True)
    for block in model.blocks:
        fully_shard(block, mesh=data, **options)
    fully_shard(model, mesh=data, **options)


def tokens_of(step: int, rank: int, index: int = 0) -> torch.Tensor:
    """Tokens [2, 7] of a rank's micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return torch.randint(0, 37, (2, 7), generator=generator)
