"""What the tests of several files compare with."""

import functools
from collections.abc import Callable

import pytest

from tests.megatron_zpp.train.training_runs import run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The log of one rank for some flags, which trains once however often it is asked for."""
    return functools.cache(lambda flags: run(1, flags, tmp_path_factory.mktemp("alone")))
