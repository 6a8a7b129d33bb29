"""Where this process stands among the others: the only place that reads the environment.

Launchers (torchrun, `zeropp`, Slurm through torchrun) describe each process by four variables;
without them there is one rank. A *node* is the set of ranks with fast links to each other.
"""

import os
from dataclasses import dataclass

from zeropp.errors import InputError


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


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_cores(num_ranks: int) -> None:
    """Give each of the ranks that this process starts its share of the cores, unless told."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(cores()) // num_ranks)))


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
