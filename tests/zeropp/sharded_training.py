"""Steps and evaluations of a sharded small model, and random weights for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Sharding, shard
from zeropp.checkpoint.kept_codes import codes_to_load
from zeropp.wire import coding_choice, rank_group

QWZ = {"stage": 3, "zero_quantized_weights": True}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
BOTH = QWZ | HPZ
ALL = BOTH | {"zero_quantized_gradients": True}


def shard_on_nodes(zero: dict, model: nn.Module | None = None, **settings: object) -> Sharding:
    return shard(model or small_model(), data_mesh(), zero_config(zero, 2, **settings))


@contextmanager
def two_machines(*, without_gloo: bool = False) -> Iterator[None]:
    """Where "auto" tries in all steps whether to code; ranks send lengths first `without_gloo`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_WORLD_SIZE", "2")
        patch.setattr(coding_choice, "PAUSE", 0)
        patch.setattr(coding_choice, "SHARE", 1e9)
        if without_gloo:
            patch.setattr(rank_group, "uses_gloo", lambda _: False)
        yield


def step(sharding: Sharding, optimizer, number: int, *, micro_batches: int = 1) -> list[float]:
    """One optimizer step; the losses of this rank's micro-batches."""
    losses = []
    for index in range(micro_batches):
        tokens = tokens_of(97 * number + index).chunk(4)[dist.get_rank()]
        with sharding.micro_step(last=index == micro_batches - 1):
            loss = loss_of(sharding.model, tokens)
            (loss / micro_batches).backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def evaluate(sharding: Sharding) -> float:
    sharding.model.eval()
    with torch.no_grad():
        loss = loss_of(sharding.model, tokens_of(5)).item()
    sharding.release()
    sharding.model.train()
    return loss


def random_like(sharded_weight: DTensor, seed: int) -> DTensor:
    """Other values of the same shape, sharded alike."""
    torch.manual_seed(seed)
    whole = 0.3 * torch.randn(sharded_weight.shape)
    mesh, placements = sharded_weight.device_mesh, sharded_weight.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def load_random_weights(sharding: Sharding, seed: int) -> None:
    state = sharding.model.state_dict()
    sharding.model.load_state_dict(
        {name: random_like(tensor, seed) for name, tensor in state.items()}
    )


def restore_codes(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Go on from what `codes_to_save` returned on each rank; `saved` may hold other tensors too."""
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: tensor.to("meta") for name, tensor in saved.items()})
    codes = codes_to_load(model, {name: each for of in everywhere for name, each in of.items()})
    for name, tensor in codes.tensors.items():
        tensor.copy_(saved[name])
    codes.restore()


def freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
