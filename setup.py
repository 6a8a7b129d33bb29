"""The part of the build that pyproject.toml cannot say: the optional C++ extension of csrc/."""

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """The extensions to build; none yet, and none without a compiler: the package is pure Python.

    The kernels of csrc/ belong here, each `optional=True`, so that a failed build leaves the plain
    torch references of `zeropp` in their place.
    """
    return []


setup(ext_modules=extensions())
