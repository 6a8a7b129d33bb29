"""`srun` and `mpirun` as launchers: what Slurm and MPI say of ranks, under torchrun's names."""

import re
from collections.abc import Mapping

from zeropp.errors import InputError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NAMES = (*RANKS, "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_MPI = (  # RANKS by Open MPI, MPICH and Intel MPI, Cray
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
OF_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
ALONE = dict.fromkeys(("RANK", "SLURM_PROCID", "PMIX_RANK", *(names[0] for names in OF_MPI)), "0")
ALONE |= dict.fromkeys((names[1] for names in OF_MPI), "1")
HERE, MPI_PORT = "127.0.0.1", 29500
FIRST_PORT, NUM_PORTS = 20000, 10000  # of Slurm's steps, below the ports that systems give out


def torchrun_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set for a process of srun or mpirun; empty for any other.

    One that has another RANK and WORLD_SIZE is not theirs. Raises InputError for one of several
    processes whose numbers do not make them ranks.
    """
    launched = dict(zip(NAMES, map(str, _of_mpi(given) or _of_slurm(given)), strict=False))
    own = {name: given[name] for name in RANKS[:2] if name in given}
    agrees = own.items() <= launched.items()
    shown = launched or {each: given[each] for each in ALONE if given.get(each, "") > ALONE[each]}
    if (len(own) == 2 and not agrees) or launched.get("WORLD_SIZE") == "1" or not shown:
        return {}
    if launched and agrees:
        rank, size, local_rank, local_size, machines = (int(launched[name]) for name in NAMES[:5])
        if local_size * machines == size and rank % local_size == local_rank:
            return launched
    raise InputError(
        "this is one of several processes, whose numbers do not make them ranks "
        f"({', '.join(f'{name}={value}' for name, value in shown.items())}): start as many on each "
        "machine, one machine after the other (srun --ntasks-per-node N --distribution=block, or "
        "an mpirun that also numbers those of a machine), without other values of RANK and "
        "WORLD_SIZE, or use torchrun or zeropp. RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 makes a run of "
        "its own"
    )


def _of_mpi(given: Mapping[str, str]) -> tuple[object, ...]:
    for names in OF_MPI:
        if all(given.get(name, "").isdecimal() for name in names):
            ranks = [int(given[name]) for name in names]
            machines = ranks[1] // max(1, ranks[3])
            return *ranks, machines, HERE if machines == 1 else "", MPI_PORT
    return ()


def _of_slurm(given: Mapping[str, str]) -> tuple[object, ...]:
    """Only steps of srun have a number of tasks: a script of sbatch and a shell of salloc, which
    have the other variables of a first task, are alone.
    """
    if not all(given.get(name, "").isdecimal() for name in OF_SLURM):
        return ()
    rank, size, local_rank = (int(given[name]) for name in OF_SLURM)
    machines = int(given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_NNODES") or 1)
    tasks = given.get("SLURM_STEP_TASKS_PER_NODE", str(size // machines))  # 8, 8(x2), 8(x2),4
    local_size = 0 if "," in tasks else int(tasks.partition("(")[0])
    # The first machine: node03 of node[03-07,09],other.
    first, *_ = re.sub(r"\[(\w+)[^]]*\]", r"\1", given.get("SLURM_STEP_NODELIST", "")).split(",")
    number = 31 * int(given.get("SLURM_JOB_ID", 0)) + int(given.get("SLURM_STEP_ID", 0))
    address, port = HERE if machines == 1 else first, FIRST_PORT + number % NUM_PORTS
    return rank, size, local_rank, local_size, machines, address, port
