"""Initial weights, drawn shard by shard: a seed gives the same weights on any number of ranks.

Each parameter is divided into fixed blocks of rows. The values of a block come from a generator
seeded by (seed, name of the parameter, number of the block), so a rank draws only the blocks that
overlap its shard and never holds a whole large parameter. Values are drawn on the CPU whatever the
device.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_zpp.model.mlp import XIELU
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part

BLOCK_ELEMENTS = 2**20  # 4 MiB in fp32; another number would change the weights of a seed
SCALED_WEIGHTS = ".output.weight"  # last of a residual branch


@torch.no_grad()
def initialize(model: nn.Module, seed: int, config: ModelConfig) -> None:
    """Initialize all parameters and buffers of a model in place, once `to_empty` allocated them.

    Weights and sinks are N(0, σ²) with σ = init_method_std, divided by √(2L) in the last layer of a
    residual branch; biases and buffers are 0, gains of normalizations 1 (with `apply_layernorm_1p`
    stored as 0). xIELU has its own.
    Parameters are plain tensors, or DTensors placed by Shard and Replicate on a mesh with any
    number of axes. Raises TypeError for another placement.
    """
    gain = 0.0 if config.apply_layernorm_1p else 1.0
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 and not name.endswith(".sinks"):
            local_part(parameter).fill_(0.0 if name.endswith("bias") else gain)
            continue
        std = config.init_method_std
        if name.endswith(SCALED_WEIGHTS):
            std /= math.sqrt(2 * config.num_layers)
        draw(parameter, f"{seed}/{name}", std)
    for module in model.modules():
        if isinstance(module, XIELU):
            module.reset()


def draw(parameter: Tensor, label: str, std: float) -> None:
    """Fill this rank's part of a parameter with N(0, std²); the numbers depend on `label` only.

    As many threads as PyTorch uses draw a block each, in place where the rank has all of it.
    """
    local, ranges = local_part(parameter).detach(), local_ranges(parameter)
    (local_start, local_end), *columns = ranges
    if std == 0.0 or local_start == local_end:
        local.zero_()
        return
    written = local if type(local) is Tensor else torch.empty(local.shape)  # not if it is codes
    num_rows, *row_shape = parameter.shape
    block_rows = max(1, BLOCK_ELEMENTS // math.prod(row_shape))

    def draw_block(block: int) -> None:
        first, end = block * block_rows, min((block + 1) * block_rows, num_rows)
        rows = range(max(local_start, first), min(local_end, end))
        target = written[rows.start - local_start : rows.stop - local_start]
        is_whole = target.shape == (end - first, *row_shape) and target.is_contiguous()
        in_place = is_whole and target.is_cpu and target.dtype == torch.float32
        values = target if in_place else torch.empty((end - first, *row_shape))
        digest = hashlib.blake2b(f"{label}/{block}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little")  # of 32 bits, as mt19937 has it
        values.normal_(0.0, std, generator=torch.Generator().manual_seed(seed))
        if not in_place:
            of_rank = slice(rows.start - first, rows.stop - first), *(slice(*c) for c in columns)
            target.copy_(values[of_rank])

    blocks = range(local_start // block_rows, math.ceil(local_end / block_rows))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(draw_block, blocks))  # raises what a thread has raised
    if written is not local:
        local.copy_(written)


def local_ranges(parameter: Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of this rank's part of a parameter in every dimension, end exclusive.

    As in torch.chunk, Shard(d) over n ranks gives each rank ceil(size / n) indices, and the last
    ranks fewer or none. FSDP2 cuts what other axes have cut already: where both cut dimension 0,
    the placement of its axis, which is the first, has a `split_factor`. Raises TypeError for
    placements other than Shard and Replicate.
    """
    ranges = [(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return ranges
    mesh = parameter.device_mesh
    axes = enumerate(parameter.placements)
    for axis, placement in sorted(axes, key=lambda each: hasattr(each[1], "split_factor")):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard and not hasattr(placement, "split_factor"):
            raise TypeError(f"cannot initialize a parameter placed as {placement}")
        start, end = ranges[placement.dim]
        chunk = math.ceil((end - start) / mesh.size(axis))
        local_start = min(start + mesh.get_local_rank(axis) * chunk, end)
        ranges[placement.dim] = (local_start, min(local_start + chunk, end))
    return ranges
