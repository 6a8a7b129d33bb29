"""The ranks in one group: this rank's device, and the backends that suit the machine."""

import logging
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from zeropp.errors import InputError
from zeropp.ranks.topology import Environment

BOTH = "cpu:gloo,cuda:nccl"  # numbers of the hosts do not wait for the GPUs

log = logging.getLogger("zeropp")


def pick_device(environment: Environment) -> torch.device:
    """This rank's GPU where there are GPUs, the CPU otherwise."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_backend(environment: Environment, num_gpus: int, wanted: str | None) -> str:
    """`wanted`, or what suits a machine of `num_gpus` GPUs, in torch's spelling.

    Without a GPU gloo; else NCCL for CUDA tensors with gloo beside it for CPU tensors, or gloo for
    both where ranks share a GPU, which NCCL before 2.30 does not allow. Raises InputError for NCCL
    without a GPU.
    """
    if not num_gpus:
        if wanted == "nccl":
            raise InputError("the backend nccl needs a GPU, and PyTorch sees none: use gloo")
        return wanted or "gloo"
    ranks_here = -(-environment.world_size // environment.machines)
    if wanted is None and ranks_here > num_gpus:
        log.info("%d ranks share %d GPU(s): they exchange data by gloo", ranks_here, num_gpus)
        return "gloo"
    return BOTH if wanted in (None, "nccl") else wanted


def start_process_group(
    environment: Environment, device: torch.device, timeout: timedelta, backend: str | None = None
) -> dist.Store:
    """Join the ranks into the default process group and return the store they met at.

    `backend` is torch's spelling ("gloo", "nccl", ...) or None for the one that suits the machine.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend = choose_backend(environment, num_gpus, backend)
    place = {"rank": environment.rank, "world_size": environment.world_size, "timeout": timeout}
    store = open_store(environment, timeout)
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), **place)
    return store


def open_store(environment: Environment, timeout: timedelta) -> dist.Store:
    """Connect to the store through which the ranks meet, without joining a process group.

    `timeout` also applies to later requests. Raises `dist.DistError` if the store is not there.
    """
    if not environment.launched:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return store


def leave(status: int) -> NoReturn:
    """End this rank's process with an exit status, files written and closed, in one step.

    A thread of gloo may still hold the last reference to a tensor, and in PyTorch 2.13 some groups
    outlive `destroy_process_group`. Were it to let go while Python takes itself apart, the process
    would end with SIGABRT. So Python does not take itself apart; `atexit` is not called.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
