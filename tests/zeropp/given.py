"""A model whose gradients are prescribed, so that what became of them on the wire can be measured.

The gradient of each weight is the tensor given for it: the loss is the sum of weight times given.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropp import Sharding, ZeroConfig, shard

ALL_THREE = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
}


class Given(nn.Module):
    """A unit with weights of any shape; `given` holds a gradient, or None, for each of them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.given: list[torch.Tensor | None] = [None] * len(shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, given in zip(self.weights, self.given, strict=True):
            if given is not None:
                x = x + (weight * given.to(weight.dtype)).sum()
        return x


class GivenStack(nn.Module):
    """Units after each other; `shapes` are those of each unit's weights."""

    def __init__(self, shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        super().__init__()
        self.units = nn.ModuleList([Given(one) for one in shapes])

    def forward(self) -> torch.Tensor:
        x = torch.zeros((), device=next(self.parameters()).device)
        for unit in self.units:
            x = unit(x)
        return x


def data_mesh(device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("data",))


def configured(zero: dict, ranks_per_node: int | None = None, **settings: object) -> ZeroConfig:
    """A configuration of the section `zero_optimization`, nodes of some ranks, and other keys."""
    zeropp = {"zeropp": {"ranks_per_node": ranks_per_node, **settings.pop("zeropp", {})}}
    if ranks_per_node is None:
        del zeropp["zeropp"]["ranks_per_node"]
    return ZeroConfig.from_json({"zero_optimization": zero, **zeropp, **settings})


def shard_given(shapes: Sequence, config: ZeroConfig) -> Sharding:
    torch.manual_seed(0)
    return shard(GivenStack(shapes), data_mesh(), config)


def gradient_of(rank: int, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A rank's gradient of one weight, Gaussian; tensors differ by factors of ten."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randn(shape, generator=generator) * 10.0 ** (index % 5 - 3)


def backward(sharding: Sharding, gradients: Sequence[torch.Tensor], *, last: bool = True) -> None:
    """One micro-batch, with one gradient, or None, for each weight of the model in order."""
    rest = list(gradients)
    for unit in sharding.model.units:
        unit.given = [rest.pop(0) for _ in unit.given]
    with sharding.micro_step(last=last):
        sharding.model().backward()


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor."""
    slices = whole.chunk(dist.get_world_size())
    return slices[dist.get_rank()] if dist.get_rank() < len(slices) else whole[:0]
