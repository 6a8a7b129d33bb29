"""What several test files here share: the CUDA kernels, compiled to run on the CPU."""

import pytest

from tests.zeropp.quant.emulated_kernels import EmulatedLibrary, build


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLibrary:
    """The library that a GPU would run, compiled once."""
    return build(tmp_path_factory.mktemp("emulated"))
