"""What several test files here share: the CUDA kernels, compiled to run on the CPU."""

import os

import pytest
from filelock import FileLock

from tests.zeropp.quant.emulated_kernels import EmulatedLibrary, build, load


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLibrary:
    """The library that a GPU would run, compiled once for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "emulated.lock"):
        build(folder)
    return load(folder)
