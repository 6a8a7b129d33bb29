"""Where a process stands, and what its collectives run on."""

import pytest

from zeropp.errors import InputError
from zeropp.topology import Environment, choose_backend

BOTH = "cpu:gloo,cuda:nccl"


def place(world_size: int, **parts: int) -> Environment:
    return Environment(world_size=world_size, **parts)


@pytest.mark.parametrize(
    ("ranks", "machines", "num_gpus", "wanted", "expected"),
    [
        (4, 1, 0, None, "gloo"),
        (4, 1, 4, None, BOTH),
        (16, 2, 8, None, BOTH),
        (4, 1, 1, None, "gloo"),  # NCCL refuses two ranks on one GPU
        (4, 1, 1, "nccl", "nccl"),  # asked for: NCCL 2.30 can be told to allow it
        (4, 1, 4, "gloo", "gloo"),
    ],
)
def test_backend(ranks, machines, num_gpus, wanted, expected):
    assert choose_backend(place(ranks, machines=machines), num_gpus, wanted) == expected


def test_nccl_without_a_gpu():
    with pytest.raises(InputError, match="nccl needs a GPU"):
        choose_backend(place(2), 0, "nccl")


def test_nodes_smaller_than_the_machine_do_not_hide_how_many_ranks_it_has(monkeypatch):
    variables = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in (variables | {"GROUP_WORLD_SIZE": 1}).items():
        monkeypatch.setenv(name, str(value))
    environment = Environment.read()
    assert environment.local_world_size == 2 and environment.machines == 1
    assert choose_backend(environment, 2, None) == "gloo"


def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(InputError, match="WORLD_SIZE is 'four'"):
        Environment.read()
