"""The structure of the project: what may import what, how long things get, where state may live.

import-linter keeps the layers of the rooms and ruff the rules of style (both in pyproject.toml).
What neither of them can say is checked here.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zeropp", "megatron_zpp")
MAX_FILES_IN_FOLDER = 20
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_TYPES = re.compile(r"(.*\.)?(list|dict|set|deque|defaultdict|Counter|Weak\w+)")
# The one variable of a module: what holds shards. The docstring of the module says why.
STATE = {"zeropp/wire/shard_holders.py": "_holders"}
MIRRORS = (("zeropp", "deepspeed"), ("zeropp", "integrations"))  # of others' names
HOOKS_OF_STEPS = "register_optimizer_step"  # torch's, of all optimizers
VAGUE_NAMES = ("utils", "util", "helpers", "misc", "common")
FOLDERS = ("zeropp", "megatron_zpp", "csrc", "benchmarks", "tools", "examples", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def run_python(*arguments: str) -> str:
    """Run Python in the project's root; return what it prints if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return (result.stdout + result.stderr) if result.returncode else ""


def test_imports_between_rooms_go_down_only() -> None:
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert not (report := run_python("-c", command, "--no-cache")), report


def test_ruff_finds_nothing() -> None:
    assert not (report := run_python("-m", "ruff", "check", "--no-cache", ".")), report
    assert not (report := run_python("-m", "ruff", "format", "--check", "--no-cache", ".")), report


def test_a_folder_has_few_files() -> None:
    sources = [
        path
        for folder in (*PACKAGES, "csrc", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu") and path.name != "__init__.py"
    ]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources)
    crowded = {folder: count for folder, count in counts.items() if count > MAX_FILES_IN_FOLDER}
    assert not crowded


def test_files_and_functions_are_short_and_named_after_one_thing() -> None:
    problems = []
    for path in SOURCES:
        text = path.read_text()
        place = path.relative_to(ROOT)
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            problems.append(f"{place}: {lines} lines; split it by subject")
        if path.stem in VAGUE_NAMES:
            problems.append(f"{place}: name the file after the one thing it is about")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    problems.append(f"{place}:{node.lineno}: {node.name}() has {length} lines")
    assert not problems, "\n".join(problems)


def test_megatron_zpp_imports_rooms_of_zeropp_and_no_file_of_them() -> None:
    room = re.compile(r"zeropp(\.(capabilities\.)?\w+)?")
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == "megatron_zpp"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zeropp")
        if not room.fullmatch(node.module)
    ]
    assert not wrong, "the room's __init__.pyi says what it exports:\n" + "\n".join(wrong)


def test_no_two_public_classes_have_one_name() -> None:
    files = {}  # of each name
    for path in SOURCES:
        room = path.relative_to(ROOT).parts[:2]
        if room[0] in PACKAGES and room not in MIRRORS:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: twins for name, twins in files.items() if len(twins) > 1}


def test_modules_hold_no_state_and_leave_torch_alone() -> None:
    problems = []
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            tree = ast.parse(path.read_text())
            place = path.relative_to(ROOT)
            variables = module_variables(tree, STATE.get(str(place)))
            problems += [f"{place}:{line}" for line in variables]
            problems += [f"{place}:{line}" for line in patches_of_torch(tree)]
    assert not problems, "\n".join(problems)


def test_one_module_takes_notice_of_optimizers_steps() -> None:
    users = {str(path.relative_to(ROOT)) for path in SOURCES if HOOKS_OF_STEPS in path.read_text()}
    assert {each for each in users if each.startswith(PACKAGES)} == STATE.keys()


def module_variables(tree: ast.Module, but: str | None = None) -> Iterator[str]:
    """Yield module-level lists, dicts and sets that are not named as constants, `but` one."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        mutable = isinstance(node.value, MUTABLE)
        if isinstance(node.value, ast.Call):
            mutable = MUTABLE_TYPES.fullmatch(ast.unparse(node.value.func)) is not None
        for target in targets:
            name = ast.unparse(target)
            if mutable and name.upper() != name and name not in ("__all__", but):
                yield f"{node.lineno}: {name} is mutable state of a module; pass it as an argument"


def patches_of_torch(tree: ast.Module) -> Iterator[str]:
    """Yield assignments to attributes of names that were imported from torch."""
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "torch"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node).partition(".")[0] in imported:
                yield f"{node.lineno}: changes {ast.unparse(node)}; torch is used, never patched"


def test_nobody_changes_what_an_object_of_others_does() -> None:
    problems = []
    for path in SOURCES:
        place = path.relative_to(ROOT)
        if place.parts[0] not in PACKAGES or place.parts[1] == "fsdp_adapter":
            continue
        tree = ast.parse(path.read_text())
        problems += [f"{place}:{line}" for line in replaced_functions(tree)]
    assert not problems, "\n".join(problems)


def replaced_functions(tree: ast.Module) -> Iterator[str]:
    """Yield where a class is assigned, an attribute by `setattr`, or a function to an attribute.

    An object may set its own attributes, and autograd's `ctx` is there to be written.
    """
    functions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if name.rpartition(".")[2] in ("setattr", "__setattr__", "MethodType"):
                if first != "self":
                    yield f"{node.lineno}: {ast.unparse(node)} changes an object of somebody else"
        for target, value in assignments(node):
            owner, _, attribute = ast.unparse(target).rpartition(".")
            is_own = owner in ("self", "cls", "ctx")
            if attribute == "__class__" or (not is_own and is_function(value, functions)):
                yield f"{node.lineno}: {ast.unparse(target)} is changed from outside"


def assignments(node: ast.AST) -> Iterator[tuple[ast.Attribute, ast.expr]]:
    """Yield the attributes that a statement assigns, with their values."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
        yield from ((each, value) for each, value in pairs if isinstance(each, ast.Attribute))


def is_function(value: ast.expr, functions: set[str]) -> bool:
    """Whether an expression is a function as far as its text tells; `functions` are the file's."""
    match value:
        case ast.Lambda():
            return True
        case ast.Call():
            return ast.unparse(value.func).rpartition(".")[2] in ("partial", "cache", "lru_cache")
        case ast.Name():
            return value.id in functions
        case ast.Attribute():
            return value.attr in functions
    return False


@pytest.mark.parametrize(
    ("rule", "source", "message"),
    [
        (replaced_functions, "a.__class__ = B", "1: a.__class__ is changed"),
        (replaced_functions, "x = 1\na.b, a.__class__ = 1, C", "2: a.__class__ is changed"),
        (replaced_functions, "setattr(a, 'b', c)", "1: setattr(a, 'b', c) changes"),
        (replaced_functions, "a.f = types.MethodType(g, a)", "1: types.MethodType(g, a) changes"),
        (replaced_functions, "a.f = lambda: 0", "1: a.f is changed"),
        (replaced_functions, "a.f = functools.partial(g, 1)", "1: a.f is changed"),
        (replaced_functions, "def g():\n  a.f = g", "2: a.f is changed"),
        (replaced_functions, "class A:\n  def g(self):\n    self.o.f = self.g", "3: self.o.f is"),
        (module_variables, "groups = {}", "1: groups is mutable state"),
        (module_variables, "x = 1\nseen: list = []", "2: seen is mutable state"),
        (module_variables, "seen = weakref.WeakSet()", "1: seen is mutable state"),
        (patches_of_torch, "import torch\ntorch.nn.Linear.forward = None", "2: changes torch.nn"),
    ],
)
def test_a_broken_rule_is_reported_with_its_line(rule, source: str, message: str) -> None:
    (problem,) = rule(ast.parse(source))
    assert problem.startswith(message)
