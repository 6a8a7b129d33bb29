"""Where this process stands among the others: the only place that reads the environment.

Launchers (torchrun, `zeropp`, Slurm through torchrun) describe each process by four variables;
without them there is one rank. A *node* is the set of ranks with fast links to each other.
"""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.errors import InputError

log = logging.getLogger("zeropp")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One process's place: `rank` of `world_size`, `local_rank` of `local_world_size` on a node.

    `machines` is how many computers the ranks are spread over; a node may be a part of one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    machines: int = 1
    launched: bool = False

    @classmethod
    def read(cls) -> "Environment":
        """The place the launcher gave this process; one rank where there was no launcher."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        world_size = _number("WORLD_SIZE")
        local_world_size = _number("LOCAL_WORLD_SIZE", default=world_size)
        place = cls(
            rank=_number("RANK"),
            world_size=world_size,
            local_rank=_number("LOCAL_RANK"),
            local_world_size=local_world_size,
            machines=_number("GROUP_WORLD_SIZE", default=-(-world_size // local_world_size)),
            launched=True,
        )
        if not 0 <= place.rank < world_size:
            raise InputError(f"RANK={place.rank} is not below WORLD_SIZE={world_size}")
        return place


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
    both where ranks share a GPU, which NCCL does not allow. Raises InputError for NCCL without one.
    """
    if not num_gpus:
        if wanted == "nccl":
            raise InputError("the backend nccl needs a GPU, and PyTorch sees none: use gloo")
        return wanted or "gloo"
    ranks_here = -(-environment.world_size // environment.machines)
    if wanted is None and ranks_here > num_gpus:
        log.info("%d ranks share %d GPU(s): they exchange data by gloo", ranks_here, num_gpus)
        return "gloo"
    return wanted or "cpu:gloo,cuda:nccl"


def start_process_group(
    environment: Environment, device: torch.device, timeout: timedelta, backend: str | None = None
) -> dist.Store:
    """Join the ranks into the default process group and return the store they met at.

    `backend` is torch's spelling ("gloo", "nccl", ...) or None for the one that suits the machine.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend = choose_backend(environment, num_gpus, backend)
    place = {"rank": environment.rank, "world_size": environment.world_size, "timeout": timeout}
    if environment.launched:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
    else:
        store = dist.HashStore()
    dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), **place)
    return store


def share_cores(num_ranks: int) -> None:
    """Give each of the ranks that this process starts its share of the cores, unless told."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // num_ranks)))


def one_rust_thread() -> None:
    """Let libraries written in Rust (tokenizers) use one thread; before the first use of one."""
    os.environ["RAYON_NUM_THREADS"] = "1"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isdigit():
        raise InputError(
            f"the environment variable {name} is {text!r}, not a number: "
            "start the ranks with torchrun or zeropp, which set it"
        )
    return int(text)
