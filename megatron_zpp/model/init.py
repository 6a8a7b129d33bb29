"""Initial weights, drawn shard by shard: the same seed gives the same weights on any ranks.

Each parameter is cut into fixed blocks of rows. A block's values come from a generator seeded by
(seed, parameter's name, number of the block), so a rank draws only the blocks its shard touches
and never holds a whole large parameter. The draws are made on the CPU, whatever the device.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_zpp.settings.config import ModelConfig
from zeropp.optim.step import local_part

BLOCK_ELEMENTS = 2**20  # 4 MiB in fp32; fixed, or the same seed would give other weights
SCALED_WEIGHTS = ("attention.output.weight", "mlp.output.weight")  # these end a residual branch


@torch.no_grad()
def initialize(model: nn.Module, seed: int, config: ModelConfig) -> None:
    """Fill every parameter of a model whose storage exists (after `to_empty`) with first values.

    Weights are N(0, σ²) with σ = init_method_std, σ/√(2L) where a branch joins the residual stream;
    biases 0; gains of normalizations 1. Parameters may be plain tensors or DTensors placed by
    Shard and Replicate on a mesh of any number of axes. Raises TypeError for another placement.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            local_part(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = config.init_method_std
        if name.endswith(SCALED_WEIGHTS):
            std /= math.sqrt(2 * config.num_layers)
        draw(parameter, f"{seed}/{name}", std)


def draw(parameter: Tensor, label: str, std: float) -> None:
    """Fill this rank's part of a matrix with N(0, std²): the same numbers for the same label."""
    local = local_part(parameter)
    if std == 0.0:
        local.zero_()
        return
    for rows, values in _blocks(label, parameter.shape, local_ranges(parameter), std):
        local[rows] = values.to(local.dtype)


def local_ranges(parameter: Tensor) -> list[tuple[int, int]]:
    """First and one-past-last global index of this rank's part of a parameter, for every dim.

    Shard(d) over n ranks gives each ceil(size / n) indices, fewer or none to the last ones, as
    torch.chunk does. Raises TypeError for placements other than Shard and Replicate.
    """
    ranges = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return ranges
    mesh = parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:
            raise TypeError(f"cannot initialize a parameter placed as {placement}")
        first, end = ranges[placement.dim]
        chunk = -(-(end - first) // mesh.size(axis))
        start = min(first + mesh.get_local_rank(axis) * chunk, end)
        ranges[placement.dim] = (start, min(start + chunk, end))
    return ranges


def _blocks(
    label: str, shape: torch.Size, ranges: list[tuple[int, int]], std: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (local rows, fp32 values) for each block of rows that overlaps the local part."""
    first, end = ranges[0]
    height = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    columns = tuple(slice(*part) for part in ranges[1:])
    for block in range(first // height, -(-end // height) if end > first else 0):
        top = block * height
        bottom = min(top + height, shape[0])
        values = torch.empty((bottom - top, *shape[1:]))
        values.normal_(0.0, std, generator=_generator(f"{label}/{block}"))
        low, high = max(first, top), min(end, bottom)
        yield slice(low - first, high - first), values[(slice(low - top, high - top), *columns)]


def _generator(label: str) -> torch.Generator:
    digest = hashlib.blake2b(label.encode(), digest_size=4).digest()  # mt19937 takes 32 bits
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
