"""One rank of a process group of any size, without other ranks and without memory.

It counts the bytes that a step sends. PyTorch's fake process group sends nothing and returns at
once, and on fake tensors nothing is computed. Everything else runs: FSDP2, the collectives' layouts
and hops, the traffic ledger.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeropp import Sharding, ZeroConfig, shard

Loss = Callable[[nn.Module], torch.Tensor]


@contextmanager
def fake_rank(rank: int, num_ranks: int) -> Iterator[DeviceMesh]:
    """Act as `rank` of a fake process group of `num_ranks`; yields its one-dimensional mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("data",))
    finally:
        dist.destroy_process_group()


def counted_step(
    build: Callable[[], nn.Module],
    loss: Loss,
    mesh: DeviceMesh,
    config: ZeroConfig,
    num_micro_batches: int = 1,
) -> Sharding:
    """Shard the model that `build` returns and run one step; the bytes are in `traffic`.

    With `weight_steps` it is the second step: in the first one whole codes cross.
    """
    with torch.device("meta"):
        model = build()
    sharding = shard(model, mesh, config)

    def run_step() -> None:
        for index in range(num_micro_batches):
            with sharding.micro_step(last=index == num_micro_batches - 1):
                loss(model).backward()

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        if config.zeropp.weight_steps:
            run_step()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
            sharding.traffic.take()
        run_step()
    return sharding
