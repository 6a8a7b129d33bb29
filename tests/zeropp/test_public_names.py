"""`import zeropp` promises a handful of names; torch comes with the first that needs it."""

import ast
import inspect
import random
import subprocess
import sys
from types import ModuleType

import pytest

import zeropp


def printed(code: str) -> str:
    """What a program prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", range(2))
def test_the_order_in_which_names_are_used_does_not_matter(seed: int) -> None:
    names = random.Random(seed).sample(zeropp.__all__, len(zeropp.__all__))
    code = "import zeropp\n"
    for place, name in enumerate(names):
        code += f"zeropp.{name}\n" if place % 2 else f"from zeropp import {name}\n"
    code += "print(*(type(getattr(zeropp, name)).__name__ for name in zeropp.__all__))"
    kinds = printed(code).split()
    assert kinds == [type(getattr(zeropp, name)).__name__ for name in zeropp.__all__]


def test_shard_is_the_function_after_every_module_is_imported() -> None:
    code = "import pkgutil, importlib, zeropp\n"
    code += "for one in pkgutil.walk_packages(zeropp.__path__, 'zeropp.'):\n"
    code += "    importlib.import_module(one.name) if 'kernels' not in one.name else None\n"
    code += "print(*(callable(getattr(zeropp, name)) for name in zeropp.__all__))"
    assert printed(code).split() == [str(name != "zero") for name in zeropp.__all__]


def test_names_are_where_editors_look_for_them() -> None:
    tree = ast.parse(inspect.getsource(zeropp))
    shown = {
        alias.name: f"{node.module}.{alias.name}" if node.module == "zeropp" else node.module
        for branch in tree.body if isinstance(branch, ast.If)
        for node in branch.body
        for alias in node.names
    }  # fmt: skip
    assert sorted(shown) == sorted(zeropp.__all__)
    for name, module in shown.items():
        found = getattr(zeropp, name)
        expected = found.__name__ if isinstance(found, ModuleType) else found.__module__
        assert module == expected, name
    assert set(zeropp.__all__) < set(dir(zeropp))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'zeropp' has no attribute 'sharp'"):
        zeropp.sharp  # noqa: B018


@pytest.mark.new_interpreter
def test_torch_comes_with_the_first_name_that_needs_it() -> None:
    code = "import sys, zeropp\nzeropp.ZeroConfig, zeropp.InputError, dir(zeropp)\n"
    code += "print('torch' in sys.modules)\nzeropp.Engine\nprint('torch' in sys.modules)"
    assert printed(code).split() == ["False", "True"]
