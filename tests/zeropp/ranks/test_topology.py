"""Reading the place of a process from the launcher's environment variables."""

import os

import pytest

from zeropp.errors import InputError
from zeropp.ranks.topology import Environment


def test_nodes_smaller_than_the_machine_do_not_hide_how_many_machines_there_are(monkeypatch):
    variables = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in (variables | {"GROUP_WORLD_SIZE": 1}).items():
        monkeypatch.setenv(name, str(value))
    environment = Environment.read()
    assert environment.local_world_size == 2 and environment.machines == 1


def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(InputError, match="WORLD_SIZE is 'four'"):
        Environment.read()


STEP = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_NTASKS": 16}
TASK = STEP | {
    **{"SLURM_PROCID": 3, "SLURM_LOCALID": 1, "SLURM_STEP_NUM_NODES": 2},
    **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[03-04,9],login"},
}
MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}.items()
}
HYDRA = {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}
BATCH_SCRIPT = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
THEIRS = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}


def environment_with(monkeypatch, variables: dict) -> Environment:
    variables = {name: str(value) for name, value in variables.items()}
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    environment = Environment.read()
    assert Environment.read() == environment
    assert os.environ.items() >= variables.items()
    return environment


@pytest.mark.parametrize(
    ("variables", "address", "port"),
    [
        (TASK, "gpu03", "20217"),  # 31 * 7 + 0 from the first port
        (TASK | {"SLURM_STEP_NODELIST": "a-[7]-ib"}, "a-7-ib", "20217"),
        (TASK | {"MASTER_ADDR": "node0", "MASTER_PORT": 5}, "node0", "5"),
        (MPI | {"MASTER_ADDR": "node0"}, "node0", "29500"),
        (MPI, "", "29500"),  # which the meeting refuses
        (HYDRA | {"MASTER_ADDR": "node0"}, "node0", "29500"),
        (TASK | {"WORLD_SIZE": 4, "PMI_RANK": 3, "PMI_SIZE": 4}, "gpu03", "20217"),
        # mpirun starts its daemons, one on each machine, by srun
        (MPI | TASK | {"SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2}, "", "29500"),
    ],
)
def test_tasks_of_slurm_and_mpi_are_ranks(variables, address, port, monkeypatch):
    environment = environment_with(monkeypatch, variables)
    assert (environment.rank, environment.world_size, environment.launched) == (3, 4, True)
    assert (environment.local_rank, environment.local_world_size, environment.machines) == (1, 2, 2)
    assert environment.meeting_point == (address, port)


@pytest.mark.parametrize(
    "variables",
    [
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_STEP_NUM_TASKS": 1},  # a shell of salloc
        {"PMI_RANK": 0, "PMI_SIZE": 1},
        TASK | THEIRS,
        MPI | THEIRS,
    ],
)
def test_a_process_that_is_alone(variables, monkeypatch):
    environment = environment_with(monkeypatch, variables)
    assert (environment.rank, environment.world_size, environment.local_world_size) == (0, 1, 1)


@pytest.mark.parametrize(
    "variables",
    [
        TASK | {"SLURM_STEP_TASKS_PER_NODE": "3,1"},
        TASK | {"SLURM_LOCALID": 0},  # --distribution=cyclic
        TASK | {"WORLD_SIZE": 16},
        {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": 3},
        {"PMI_RANK": 0, "PMI_SIZE": 4},
        BATCH_SCRIPT | {"SLURM_PROCID": 1},
        {"PMIX_RANK": 2},
        {"RANK": 2},
    ],
)
def test_one_of_several_processes_that_cannot_be_ranks(variables, monkeypatch):
    with pytest.raises(InputError, match="one of several processes, whose numbers .*makes a run"):
        environment_with(monkeypatch, variables)
