"""The default process group: the device of this rank, and the backends that suit the machine."""

import logging
import math
import re
import socket
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.errors import InputError, NetworkError
from zeropp.ranks.reachability import refuse, require_reachable
from zeropp.ranks.rendezvous import attempt_store, open_store
from zeropp.ranks.topology import Environment

# Collectives of CPU tensors do not wait for the GPUs.
GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"
GLOO_OR_NCCL = re.compile("gloo|nccl")  # in the names of backends, others connect in other ways
REFUSAL_TIMEOUT = timedelta(seconds=5)

log = logging.getLogger("zeropp")


def pick_device(environment: Environment) -> torch.device:
    """Return the GPU of this rank, after making it the current device; the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # else a device mesh would make that of the local rank the current one
    return device


def choose_backend(environment: Environment, num_gpus: int, requested: str | None) -> str:
    """Return `requested`, or the backend that suits a machine with `num_gpus` GPUs.

    That is gloo without a GPU, else NCCL for CUDA tensors and gloo for CPU tensors. Ranks that
    share a GPU use gloo for both, as NCCL before 2.30 does not support sharing. Raises InputError
    for NCCL without a GPU.
    """
    if not num_gpus:
        if requested == "nccl":
            raise InputError("the backend nccl needs a GPU, and PyTorch sees none: use gloo")
        return requested or "gloo"
    ranks_per_machine = math.ceil(environment.world_size / environment.machines)
    if requested is None and ranks_per_machine > num_gpus:
        log.info(
            "%d ranks share %d GPU(s), so they communicate through gloo",
            ranks_per_machine,
            num_gpus,
        )
        return "gloo"
    return GLOO_AND_NCCL if requested in (None, "nccl") else requested


def start_process_group(
    environment: Environment,
    device: torch.device,
    timeout: timedelta,
    backend: str | None = None,
    *,
    world: Environment | None = None,
) -> dist.Store:
    """Initialize the default process group, and return the store that all ranks share.

    With a `world` (`Environment.within`) the group is of its ranks alone, which use the part
    `world_store` of the store.

    `backend` is a name that PyTorch knows ("gloo", "nccl", ...), or None for the one that suits the
    machine. Raises NetworkError if the ranks cannot meet or cannot connect to each other.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend = choose_backend(environment, num_gpus, backend)
    store = open_store(environment, timeout)
    try:
        store = attempt_store(store, environment)
        if environment.world_size > 1 and GLOO_OR_NCCL.search(backend):
            addresses = dist.PrefixStore("addresses", store)
            require_reachable(addresses, environment, with_nccl="nccl" in backend)
    except dist.DistNetworkError as error:
        raise NetworkError(
            f"rank {environment.rank} on {socket.gethostname()} has lost the store in which ranks "
            "meet: rank 0 or the launcher that keeps it has ended, and says why on its machine"
        ) from error
    except dist.DistStoreError as error:
        raise NetworkError(str(error)) from error
    own = world or environment
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", world_store(store, environment, own)),
        rank=own.rank,
        world_size=own.world_size,
        timeout=timeout,
    )
    return store


def world_store(store: dist.Store, environment: Environment, world: Environment) -> dist.Store:
    """Return the part of a store that is for the ranks of one world among all."""
    return dist.PrefixStore(f"world/{environment.rank // world.world_size}", store)


def refuse_to_start(environment: Environment, reason: str) -> None:
    """Tell the ranks that are in `start_process_group`, or soon will be, why this one ends."""
    with suppress(RuntimeError, InputError):  # they cannot be reached, or have ended as well
        store = attempt_store(open_store(environment, REFUSAL_TIMEOUT), environment)
        refuse(dist.PrefixStore("addresses", store), environment, reason)
