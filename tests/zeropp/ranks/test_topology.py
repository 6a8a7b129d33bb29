"""Reading the place of a process from the launcher's environment variables."""

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
