"""Norms of Adam's moments and of the weights, for `--log-optimizer-states-to-tensorboard`."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from megatron_zpp.monitor.event_files import Axis
from zeropp.checkpoint.state_tensors import settle
from zeropp.optim.step import local_part

MOMENTS = {"variance": "exp_avg_sq", "momentum": "exp_avg"}
KINDS = ("variance", "variance_sqrt", "momentum", "weight")


@torch.no_grad()
def optimizer_states(optimizer: torch.optim.Optimizer) -> Mapping[str, float]:
    """L1 and L2 norm and largest magnitude over all ranks, under Megatron-DeepSpeed's names.

    Every rank must call it: two small all-reduces. Parameters may be sharded over any part of the
    ranks, and lie on the device and on the host; copies count once. A moment that does not exist
    yet counts as nothing.
    """
    settle(optimizer)
    device = optimizer.param_groups[0]["params"][0].device
    sums = torch.zeros(2, len(KINDS), dtype=torch.float64, device=device)  # Σ|x|, Σx²
    peaks = torch.zeros(len(KINDS), dtype=torch.float64, device=device)
    for parameter in _parameters(optimizer):
        share = 1 / _copies(parameter)
        for kind, value in _tensors(parameter, optimizer.state.get(parameter, {})):
            magnitudes = local_part(value).abs().double()
            column = KINDS.index(kind)
            sums[0, column] += magnitudes.sum().to(device) * share
            sums[1, column] += magnitudes.square().sum().to(device) * share
            if magnitudes.numel():
                peaks[column] = torch.maximum(peaks[column], magnitudes.max().to(device))
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return _named(sums[0], sums[1].sqrt(), peaks)


def _named(l1: torch.Tensor, l2: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
    rows = {"l1": l1.tolist(), "l2": l2.tolist(), "abs_max": peaks.tolist()}
    scalars = {
        f"optimizer/{kind}_{norm}": value
        for norm, values in rows.items()
        for kind, value in zip(KINDS, values, strict=True)
    }
    return scalars | {name + Axis.TOKENS.suffix: value for name, value in scalars.items()}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(
    parameter: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> Iterable[tuple[str, torch.Tensor]]:
    yield "weight", parameter
    for kind, name in MOMENTS.items():
        if name in state:
            yield kind, state[name]
    if MOMENTS["variance"] in state:
        yield "variance_sqrt", local_part(state[MOMENTS["variance"]]).double().sqrt()


def _copies(parameter: torch.Tensor) -> int:
    """On how many ranks each element of `parameter` lies."""
    if not dist.is_initialized():
        return 1
    shards = 1
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shards *= parameter.device_mesh.size(dim)
    return dist.get_world_size() // shards
