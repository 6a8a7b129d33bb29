"""The names that `import zeropp` provides; torch is imported with the first that needs it."""

import ast
import importlib
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zeropp

ROOT = Path(zeropp.__file__).parent.parent
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


@pytest.mark.parametrize("stub", sorted(ROOT.glob("zeropp/**/__init__.pyi")), ids=str)
def test_each_name_that_a_package_exports_is_there(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    imports = [node for node in ast.parse(stub.read_text()).body if hasattr(node, "names")]
    for node in imports:
        for alias in node.names:
            assert alias.asname == alias.name, "says to type checkers that it is exported"
            value = getattr(package, alias.name)
            if isinstance(value, ModuleType):
                assert value.__name__ == f"{node.module}.{alias.name}"
            elif getattr(value, "__name__", "") == alias.name:
                assert value.__module__ == node.module, alias.name
    names = [alias.name for node in imports for alias in node.names]
    assert sorted(names) == package.__all__ and set(names) < set(dir(package))
    files = {path.stem for path in stub.parent.iterdir()}  # an import of one of these hides a name
    assert all(isinstance(getattr(package, name), ModuleType) for name in files.intersection(names))


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
