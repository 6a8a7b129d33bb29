"""How near sharded tensors are to those of one process, and how they become the same."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

NEAR = 2e-5  # of the largest element: sums of a few fp32 terms in another order
# bf16 has 8 bits of precision, fp16 has 11.
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 0.0, torch.float16: 2.0**-24}  # above 0; that of bf16 does not count


def distribute(value: torch.Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude: momentum and decay add terms of its size.

    It counts as 0.01 at least, near to which is 2e-7: a small gradient depends on weights of about
    0.3, each rounded to 3e-8, and up to some hundred of them.
    """
    return max(tensor.abs().max().item(), 1e-2)


def assert_near(actual: DTensor, expected: torch.Tensor, near: float, where: object) -> None:
    """Compare this rank's shard."""
    difference = actual.to_local() - distribute(expected, actual).to_local()
    if difference.numel() and not difference.abs().max() <= near:
        raise AssertionError(f"{where}: {difference}, allowed are {near}")


def rounding_of(terms: float, dtype: torch.dtype, count: int) -> float:
    """By how much `count` terms move when each is rounded to 16 bit; `terms` is their sum."""
    return UNIT_ROUNDOFF[dtype] * terms + count * SMALLEST[dtype]


def copy_shards(to: Mapping[str, DTensor], values: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's shards of whole `values`."""
    for name, tensor in to.items():
        local = distribute(values[name].detach(), tensor).to_local()
        tensor.detach().to_local().copy_(local)


def momenta_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """SGD's buffers of momentum, by the names of their weights."""
    momenta = {
        name: optimizer.state.get(weight, {}).get("momentum_buffer")
        for name, weight in model.named_parameters()
    }
    return {name: momentum for name, momentum in momenta.items() if momentum is not None}
