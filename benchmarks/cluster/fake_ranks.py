"""One rank of any number of them, without the others and without memory: for counting bytes.

PyTorch's fake process group sends nothing and returns at once; on fake tensors nothing is computed
either. What runs is all the rest: FSDP2, the collectives' layouts and hops, the ledger.
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
def one_rank(rank: int, num_ranks: int) -> Iterator[DeviceMesh]:
    """Be `rank` of `num_ranks` that are not there; the data axis of all of them."""
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
    """Shard what `build` makes on the meta device, and run one step; its bytes are in `traffic`."""
    with torch.device("meta"):
        model = build()
    sharding = shard(model, mesh, config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for index in range(num_micro_batches):
            with sharding.micro_step(last=index == num_micro_batches - 1):
                loss(model).backward()
    return sharding
