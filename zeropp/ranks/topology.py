"""The place of this process among the ranks, as the launcher describes it in the environment.

Launchers (torchrun, `zeropp`, `srun`, `mpirun`) describe each process by environment variables;
without them there is one rank. A *node* is a set of ranks with fast links to each other. No other
module reads the environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeropp.errors import InputError
from zeropp.ranks.other_launchers import torchrun_variables

# Of the variables that libraries read, those that mean the same on every machine.
SENT_PREFIXES = ("GLOO_", "MLFLOW_", "NCCL_", "OMP_", "PYTHON", "TORCH_", "UCX_")
# What torchrun and `zeropp` set; where one is missing, others may have started the process.
LAUNCHED = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Rank `rank` of `world_size`, which is `local_rank` of `local_world_size` on its node.

    `machines` is the number of computers that run the ranks; a node may be a part of one.
    `launched` is whether a launcher started the process. The ranks meet at `meeting_point`, a host
    and a port, where the launcher waits for them if `launcher_has_store`, and rank 0 otherwise.
    `gloo_interfaces` and `nccl_interfaces` are what the user sets for these libraries.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    machines: int = 1
    launched: bool = False
    meeting_point: tuple[str, str] = ("", "")
    launcher_has_store: bool = False
    gloo_interfaces: str | None = None
    nccl_interfaces: str | None = None

    @classmethod
    def read(cls) -> "Environment":
        """Return the environment that the launcher set; a single rank without a launcher.

        torchrun's variables are set if srun or mpirun is the launcher, also for other libraries.
        Raises InputError if a variable is not a number, if RANK is not below WORLD_SIZE, or if the
        processes of srun or mpirun cannot be ranks.
        """
        if not os.environ.keys() >= LAUNCHED:
            for name, value in torchrun_variables(os.environ).items():
                os.environ.setdefault(name, value)
        if "WORLD_SIZE" not in os.environ:
            return cls()
        world_size = _number("WORLD_SIZE")
        local_world_size = _number("LOCAL_WORLD_SIZE", default=world_size)
        environment = cls(
            rank=_number("RANK"),
            world_size=world_size,
            local_rank=_number("LOCAL_RANK"),
            local_world_size=local_world_size,
            machines=_number("GROUP_WORLD_SIZE", default=-(-world_size // local_world_size)),
            launched=True,
            meeting_point=(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")),
            launcher_has_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            gloo_interfaces=os.environ.get("GLOO_SOCKET_IFNAME"),
            nccl_interfaces=os.environ.get("NCCL_SOCKET_IFNAME"),
        )
        if not 0 <= environment.rank < world_size:
            raise InputError(f"RANK={environment.rank} is not below WORLD_SIZE={world_size}")
        return environment

    def planned(self, num_ranks: int, ranks_per_node: int) -> "Environment":
        """Return that of the first of `num_ranks` planned ranks; this process has to be alone."""
        if self.world_size > 1:
            raise InputError("--rehearse-ranks needs one process, without torchrun or zeropp")
        machines = -(-num_ranks // ranks_per_node)
        return Environment(world_size=num_ranks, local_world_size=ranks_per_node, machines=machines)

    def within(self, size: int) -> "Environment":
        """Return this process's environment in a world of `size` consecutive ranks.

        Raises InputError if the ranks cannot be cut into such worlds.
        """
        if self.world_size % size:
            raise InputError(
                f"{self.world_size} ranks cannot be cut into replicas of {size}: "
                f"start a multiple of {size}, or set zeropp.ranks_per_node to a divisor"
            )
        rank, local_size = self.rank % size, min(size, self.local_world_size)
        return replace(
            self,
            rank=rank,
            world_size=size,
            local_rank=rank % local_size,
            local_world_size=local_size,
            machines=-(-size // local_size) if self.machines > 1 else 1,
        )


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_cores(num_ranks: int) -> None:
    """Divide the cores among the ranks that this process starts, unless OMP_NUM_THREADS is set."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // num_ranks)))


def variables_for_other_machines() -> dict[str, str]:
    """Return the variables that ranks on other machines get from the one that starts them."""
    return {name: value for name, value in os.environ.items() if name.startswith(SENT_PREFIXES)}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that this one starts, with these variables too."""
    return {**os.environ, **variables}


def use_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, a fork that stands for a new one."""
    os.environ.update(variables)


def use_gpus(numbers: list[int]) -> None:
    """Let the processes that this one starts use only these of the GPUs that it may use.

    Raises InputError if CUDA_VISIBLE_DEVICES allows fewer.
    """
    usable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = usable.split(",") if usable else [str(number) for number in range(max(numbers) + 1)]
    if max(numbers) >= len(names):
        raise InputError(f"GPU {max(numbers)}: CUDA_VISIBLE_DEVICES={usable} has {len(names)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in numbers)


def gloo_interfaces(default: str | None) -> str | None:
    """Let gloo use an interface unless the user has chosen others; return the setting."""
    if default is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", default)
    return os.environ.get("GLOO_SOCKET_IFNAME")


def use_deterministic_cublas() -> None:
    """Let cuBLAS add in one order, if called before its use; the variable that is set holds."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_one_rust_thread() -> None:
    """Limit libraries written in Rust (tokenizers) to one thread, if called before their use."""
    os.environ["RAYON_NUM_THREADS"] = "1"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.lstrip("-").isdigit():
        raise InputError(
            f"the environment variable {name} is {text!r}, not a number: "
            "start the ranks with torchrun or zeropp, which set it"
        )
    return int(text)
