"""What a script says to the launcher before its ranks start: in one line, which is read, not run.

    ZEROPP = {"check": "package.module:function", "imports": ["package.module"]}

`check(arguments, num_ranks)` raises InputError for a mistake in the script's arguments, or prints
their help and raises SystemExit. It should not import torch, so that mistakes are said at once. On
CPUs the launcher imports `imports` once and forks the ranks; elsewhere, and for scripts without
such a line, each rank is a new Python program.
"""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from zeropp.errors import InputError

NAME = "ZEROPP"
KEYS = {"check", "imports"}


@dataclass(frozen=True)
class ScriptNeeds:
    """`check`, if the script names one, and the modules that its ranks share."""

    check: Callable[[list[str], int], None] | None = None
    imports: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, *, is_module: bool) -> "ScriptNeeds":
        """Read those of a script, or of a module that is run as one.

        Modules are found from now on as the script finds them. Raises InputError for a line of
        another form.
        """
        path = _module_path(name) if is_module else Path(name)
        sys.path.insert(0, str(Path.cwd() if is_module else path.resolve().parent))
        said = _said(path) if path.suffix == ".py" else {}
        line = f"{path}: {NAME} = {said!r}"
        if not isinstance(said, dict) or not said.keys() <= KEYS:
            raise InputError(f"{line}: expected a dict with the keys {' and '.join(sorted(KEYS))}")
        check = None
        if "check" in said:
            module, _, function = str(said["check"]).partition(":")
            try:
                check = getattr(import_module(module), function)
            except (ImportError, AttributeError) as error:
                raise InputError(f"{line}: the check cannot be imported: {error}") from error
        return cls(check, tuple(said.get("imports", ())))


def _module_path(name: str) -> Path:
    """Return the file that `python -m name` runs."""
    sys.path.insert(0, str(Path.cwd()))
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    sys.path.pop(0)
    return Path(spec.origin if spec is not None and spec.origin else "")


def _said(path: Path) -> object:
    """Return the value of the line; an empty dict without one, or for what is no Python."""
    try:
        statements = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):  # which the ranks say
        return {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if statement.targets[0].id == NAME:
                return ast.literal_eval(statement.value)
    return {}
