"""Names that a package hands on from its modules, which are imported when a name is first used.

The package's `__init__.pyi` says which, in imports that editors read too. Programs that need only
errors or file handling then start without importing torch.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def exports(package: str, init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, whose `__init__.py` is `init`."""
    stub = ast.parse(Path(init).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: node.module for node in imports for alias in node.names}

    @cache
    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    names = sorted(modules)
    return attribute, lambda: sorted({*vars(import_module(package)), *names}), names
