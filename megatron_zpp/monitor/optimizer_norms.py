"""Norms of an optimizer's state and of the weights, `--log-optimizer-states-to-tensorboard`."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from zeropp.optim import local_part, sharded

MOMENTS = (("variance", "exp_avg_sq"), ("momentum", "exp_avg"), ("momentum", "momentum_buffer"))
VARIANCE = "exp_avg_sq"
KINDS = ("variance", "variance_sqrt", "momentum", "weight")


@torch.no_grad()
def optimizer_norms(
    optimizer: torch.optim.Optimizer,
    pipeline_size: int = 1,
    num_stages: Callable[[torch.Tensor], int] = lambda parameter: 1,
) -> dict[tuple[str, str], float]:
    """L1 norm, L2 norm and largest magnitude over all ranks, by kind of tensor and norm.

    The kinds are those of `KINDS`, the norms "l1", "l2" and "abs_max". Every rank must call this:
    it makes two small all-reduces. Parameters may be sharded over any part of the ranks and be on
    the device or on the host; copies count once. A moment that does not exist yet counts as zero.
    The stages of a pipeline hold different parameters; `num_stages` counts the stages that hold a
    parameter.
    """
    sharded(optimizer).settle()
    device = optimizer.param_groups[0]["params"][0].device
    sums = torch.zeros(2, len(KINDS), dtype=torch.float64, device=device)  # Σ|x|, Σx²
    peaks = torch.zeros(len(KINDS), dtype=torch.float64, device=device)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = 1 / _num_copies(parameter, pipeline_size, num_stages(parameter))
            for kind, tensor in _tensors(parameter, optimizer.state.get(parameter, {})):
                magnitudes = local_part(tensor).abs().double()
                column = KINDS.index(kind)
                sums[0, column] += magnitudes.sum().to(device) * weight
                sums[1, column] += magnitudes.square().sum().to(device) * weight
                if magnitudes.numel():
                    peaks[column] = torch.maximum(peaks[column], magnitudes.max().to(device))
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    rows = {"l1": sums[0].tolist(), "l2": sums[1].sqrt().tolist(), "abs_max": peaks.tolist()}
    return {
        (kind, norm): value
        for norm, values in rows.items()
        for kind, value in zip(KINDS, values, strict=True)
    }


def _tensors(
    parameter: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> Iterable[tuple[str, torch.Tensor]]:
    yield "weight", parameter
    for kind, name in MOMENTS:
        if name in state:
            yield kind, state[name]
    if VARIANCE in state:
        yield "variance_sqrt", local_part(state[VARIANCE]).double().sqrt()


def _num_copies(parameter: torch.Tensor, pipeline_size: int, num_stages: int) -> int:
    """How many ranks have each element of `parameter`, which `num_stages` stages hold."""
    if not dist.is_initialized():
        return 1
    num_shards = 1
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                num_shards *= parameter.device_mesh.size(dim)
    return dist.get_world_size() // pipeline_size * num_stages // num_shards
