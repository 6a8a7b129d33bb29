"""The names that `import zeropp` provides; torch is imported with the first that needs it."""

import ast
import inspect
import random
import subprocess
import sys
from types import ModuleType

import pytest

import zeropp

MODULES = ("optim", "zero")


def output_of(code: str) -> str:
    """What a new interpreter prints when it runs `code`."""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("seed", range(2))
def test_the_order_in_which_names_are_used_does_not_matter(seed: int) -> None:
    names = random.Random(seed).sample(zeropp.__all__, len(zeropp.__all__))
    code = "import zeropp\n"
    for index, name in enumerate(names):
        code += f"zeropp.{name}\n" if index % 2 else f"from zeropp import {name}\n"
    code += "print(*(type(getattr(zeropp, name)).__name__ for name in zeropp.__all__))"
    kinds = output_of(code).split()
    assert kinds == [type(getattr(zeropp, name)).__name__ for name in zeropp.__all__]


def test_shard_is_the_function_after_every_module_is_imported() -> None:
    code = "import pkgutil, importlib, zeropp\n"
    code += "for module in pkgutil.walk_packages(zeropp.__path__, 'zeropp.'):\n"
    code += "    if not any(part in module.name for part in ('native._', 'integrations.')):\n"
    code += "        importlib.import_module(module.name)\n"
    code += "print(*(callable(getattr(zeropp, name)) for name in zeropp.__all__))"
    assert output_of(code).split() == [str(name not in MODULES) for name in zeropp.__all__]


def test_names_for_type_checkers_match_the_lazy_imports() -> None:
    tree = ast.parse(inspect.getsource(zeropp))
    module_of = {
        alias.name: f"{node.module}.{alias.name}" if node.module == "zeropp" else node.module
        for branch in tree.body if isinstance(branch, ast.If)
        for node in branch.body
        for alias in node.names
    }  # fmt: skip
    assert sorted(module_of) == sorted(zeropp.__all__)
    for name, module in module_of.items():
        value = getattr(zeropp, name)
        expected = value.__name__ if isinstance(value, ModuleType) else value.__module__
        assert module == expected, name
    assert set(zeropp.__all__) < set(dir(zeropp))


@pytest.mark.parametrize(
    "code",
    [
        "import zeropp\nprint(zeropp.optim.CPUAdam.__name__, zeropp.zero.Init.__name__)",
        "from zeropp.optim import CPUAdam\nfrom zeropp.zero import Init, GatheredParameters\n"
        "print(CPUAdam.__name__, Init.__name__)",
    ],
)
def test_public_subpackages_resolve(code: str) -> None:
    assert output_of(code).split() == ["CPUAdam", "Init"]


@pytest.mark.parametrize("module", [zeropp, zeropp.optim])
def test_an_unknown_name_is_an_attribute_error(module: ModuleType) -> None:
    message = f"'{module.__name__}' has no attribute 'sharp'"
    with pytest.raises(AttributeError, match=message):
        module.sharp  # noqa: B018


@pytest.mark.new_interpreter
def test_torch_is_imported_with_the_first_name_that_needs_it() -> None:
    code = "import sys, zeropp\nzeropp.ZeroConfig, zeropp.InputError, dir(zeropp)\n"
    code += "print('torch' in sys.modules)\nzeropp.Engine\nprint('torch' in sys.modules)"
    assert output_of(code).split() == ["False", "True"]
