"""`deepspeed.comm`: torch.distributed, and `init_distributed`."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropp.deepspeed.names import attribute_of
from zeropp.errors import InputError, NetworkError
from zeropp.ranks.process_group import choose_backend, pick_device, start_process_group
from zeropp.ranks.topology import Environment

DEEPSPEED_PORT = 29500  # DeepSpeed's default; here the launcher chooses the port
TIMEOUT = timedelta(minutes=30)  # of a collective, as torch's default


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEEPSPEED_PORT,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    *,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the default process group, unless this process has joined one.

    The launcher's environment says which rank this is, and where ranks meet.

    Args:
        dist_backend: "gloo" or "nccl"; by default what fits the device.
        auto_mpi_discovery: No effect. Tasks of srun and mpirun always get torchrun's variables.
        distributed_port: No other than DeepSpeed's default: the launcher chooses the port.
        verbose: No effect.
        timeout: Of a collective.
        init_method: "tcp://HOST:PORT" or "file://PATH", where the ranks meet without a launcher; by
            default, and with "env://", they meet as the launcher says.
        dist_init_required: False makes it an error that the process has not joined a group yet.
        config: No effect.
        rank: This rank, as the launcher says it if there is one.
        world_size: The number of ranks, as the launcher says it if there is one.

    Raises:
        InputError: For another port, a rank or number of ranks that is not the launcher's, and if
            the ranks cannot meet.

    Example:
        ```python
        deepspeed.init_distributed()
        print(dist.get_rank(), "of", dist.get_world_size())
        ```
    """
    refuse_port(distributed_port)
    environment = Environment.read()
    as_launched = init_method in (
        None, "env://", "tcp://{}:{}".format(*environment.meeting_point),
    )  # fmt: skip
    if as_launched or environment.launched:
        _require_rank_of_launcher(rank, world_size, environment)
    elif world_size > 0:
        environment = replace(environment, rank=rank, world_size=world_size)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise InputError(
            "dist_init_required=False, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group first, or leave it to zeropp.initialize"
        )
    if as_launched:
        start_process_group(environment, pick_device(environment), timeout, dist_backend)
    else:
        _meet_at(init_method, environment, timeout, dist_backend)


def _require_rank_of_launcher(rank: int, world_size: int, environment: Environment) -> None:
    expected = (environment.rank, environment.world_size)
    if (rank, world_size) not in ((-1, -1), expected):
        raise InputError(
            f"rank = {rank} and world_size = {world_size}, and the launcher says {expected[0]} and "
            f"{expected[1]}: leave them out"
        )


def _meet_at(
    init_method: str, environment: Environment, timeout: timedelta, backend: str | None
) -> None:
    """Join the default group through torch's own rendezvous."""
    is_cuda = pick_device(environment).type == "cuda"
    backend = choose_backend(environment, torch.cuda.device_count() if is_cuda else 0, backend)
    rank, world_size = environment.rank, environment.world_size
    try:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise NetworkError(
            f"rank {rank} of {world_size} cannot meet at {init_method!r}: {error}; give an "
            "init_method that all ranks reach, or leave it out and start them with a launcher"
        ) from error


def get_local_rank() -> int:
    """Return this rank's number on its node."""
    return Environment.read().local_rank


def refuse_port(distributed_port: int) -> None:
    """Raise InputError for any but the default port."""
    if distributed_port != DEEPSPEED_PORT:
        raise InputError(
            f"distributed_port = {distributed_port}: the launcher chooses the port; give it to "
            "torchrun (--master-port), or start the ranks with zeropp, which finds a free one"
        )


__getattr__ = attribute_of(__name__)
