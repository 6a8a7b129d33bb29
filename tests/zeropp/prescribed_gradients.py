"""A model with prescribed gradients, to measure how the wire changes them.

The loss is the sum of each weight times a constant, which is thus the gradient of the weight.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropp import Sharding, ZeroConfig, shard
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment

ALL_THREE = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}


class PrescribedUnit(nn.Module):
    """A unit with weights of any shape; `gradients` has a gradient, or None, for each of them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.gradients: list[torch.Tensor | None] = [None] * len(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            if gradient is not None:
                x = x + (weight * gradient.to(weight.dtype)).sum()
        return x


class PrescribedModel(nn.Module):
    """Units one after another; `shapes` has the shapes of the weights of each unit."""

    def __init__(self, shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        super().__init__()
        self.units = nn.ModuleList([PrescribedUnit(shape) for shape in shapes])

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), device=next(self.parameters()).device)
        for unit in self.units:
            x = unit(x)
        return x


def data_mesh(device: str = "cpu") -> DeviceMesh:
    if device != "cpu":
        pick_device(Environment.read())  # ranks share the GPUs
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("data",))


def zero_config(zero: dict, ranks_per_node: int | None = None, **settings: object) -> ZeroConfig:
    """A configuration with `zero` as its `zero_optimization`; `settings` are further keys."""
    zeropp = {"zeropp": {"ranks_per_node": ranks_per_node, **settings.pop("zeropp", {})}}
    if ranks_per_node is None:
        del zeropp["zeropp"]["ranks_per_node"]
    return ZeroConfig.from_json({"zero_optimization": zero, **zeropp, **settings})


def shard_prescribed(shapes: Sequence, config: ZeroConfig) -> Sharding:
    torch.manual_seed(0)
    return shard(PrescribedModel(shapes), data_mesh(), config)


def gradient_of(rank: int, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A rank's gradient of one weight, Gaussian; tensors differ by factors of ten."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(shape, generator=generator) * 10.0 ** (index % 5 - 3)


def backward(sharding: Sharding, gradients: Sequence[torch.Tensor], *, last: bool = True) -> None:
    """One micro-batch, with one gradient, or None, for each weight of the model in order."""
    remaining = list(gradients)
    for unit in sharding.model.units:
        unit.gradients = [remaining.pop(0) for _ in unit.gradients]
    with sharding.micro_step(last=last):
        sharding.model().backward()


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a full tensor that this rank stores."""
    slices = tensor.chunk(dist.get_world_size())
    return slices[dist.get_rank()] if dist.get_rank() < len(slices) else tensor[:0]
