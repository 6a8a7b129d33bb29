"""The rules of structure, as functions from a source file to what is wrong in it.

Each rule takes a `Source` and yields `line: what is wrong and what to do`. Nothing is imported,
only parsed, so that a rule also judges files that need packages which are not installed.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 7
MAX_COLUMNS = 100

PACKAGES = ("zeropp", "megatron_zpp")
READS_ENVIRONMENT = "zeropp.ranks.topology"
KNOWS_FSDP = "zeropp.fsdp_adapter"
FSDP_PRIVATE = re.compile(
    r"_fsdp_param\w*|_fsdp_state|_fully_shard|_set_unshard\w*|_get_fsdp\w*|_lazy_init|_fsdp_api"
    r"|FSDPParam\w*|FSDPState|fsdp_params?|padded_sharded_param_size"
)
MUTABLE_CALLS = ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict")
MUTATING = (
    "append appendleft extend insert add update setdefault pop popitem popleft remove discard "
    "clear sort reverse"
).split()

# Layers from the top down: a module may import from its own layer and those below it. The longest
# name that fits decides; what is not listed stands in the layer of its package's "*".
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("entry", ("megatron_zpp.train.pretrain",)),
    ("training", ("megatron_zpp.train.loop", "megatron_zpp.train.step", "megatron_zpp.train.build")),
    ("around training", ("megatron_zpp.*",)),
    (
        "building",
        ("megatron_zpp.parallel", "megatron_zpp.model", "megatron_zpp.data")
        + ("megatron_zpp.tokenizer",),
    ),
    ("settings", ("megatron_zpp.settings.config", "megatron_zpp.model.flops")),
    ("zeropp's face", ("zeropp", "zeropp.ranks.launcher", "zeropp.deepspeed.engine", "zeropp.start")),
    ("sharding", ("zeropp.*",)),
    ("collectives", ("zeropp.wire.collectives", "zeropp.wire.in_flight", "zeropp.wire.cross_stream")),
    (
        "ground",
        ("zeropp.ranks.process_group", "zeropp.fsdp_adapter", "zeropp.quant.quantize", "zeropp.wire.traffic")
        + ("zeropp.ranks.rank_main", "zeropp.ranks.coordination", "zeropp.sharding.recorded_tensor")
        + ("zeropp.wire.route", "zeropp.wire.link", "zeropp.wire.frozen_weights"),
    ),
    (
        "operations",
        ("zeropp.quant.ops", "zeropp.quant.packing", "zeropp.quant.reference", "zeropp.quant.cpu", "zeropp.quant.cuda")
        + ("zeropp.quant.library",),
    ),
    (
        "base",
        ("zeropp.settings.zero_config", "zeropp.settings.json_file", "zeropp.settings.sections", "zeropp.settings.schema")
        + ("zeropp.errors", "zeropp.atomic", "zeropp.ranks.topology"),
    ),
)


@dataclass(frozen=True)
class Source:
    """A Python file by its dotted module name ("zeropp.optim.step", "tools.consolidate")."""

    module: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def imports(
        self, known: Mapping[str, "Source"], inside: ast.AST | None = None
    ) -> Iterator[tuple[int, str]]:
        """(line, module) of every import of our own packages, in the file or `inside` a part of it.

        `from a import b` is an import of a.b if that is a module of `known`, else of a.
        """
        for node in self.nodes if inside is None else ast.walk(inside):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                full = [f"{base}.{alias.name}" for alias in node.names]
                names = [name if name in known else base for name in full]
            else:
                continue
            for name in dict.fromkeys(names):
                if name.partition(".")[0] in PACKAGES:
                    yield node.lineno, name

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.module.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, node.module] if node.module else kept)


def read_sources(root: Path) -> dict[str, Source]:
    """Every Python file of the project, by module name; environments and caches left out."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith(".") or part in ("build", "dist") for part in parts):
            continue
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        sources[module] = Source(module, path.read_text(), is_package)
    return sources


def layer(module: str) -> int:
    """The place of a module in `LAYERS`, 0 at the top; scripts and tools stand above everything."""
    best, place = "", -1
    for index, (_, names) in enumerate(LAYERS):
        for name in names:
            stem = name.removesuffix(".*")
            exact_only = name == "zeropp"
            fits = module == name or (not exact_only and module.startswith(stem + "."))
            if fits and len(name.rstrip("*")) > len(best):
                best, place = name.rstrip("*"), index
    return place


def wrong_direction(source: Source, known: Mapping[str, Source]) -> Iterator[str]:
    """Imports that go up, or from `zeropp` to `megatron_zpp`."""
    if source.package not in PACKAGES:
        return
    here = layer(source.module)
    for line, target in source.imports(known):
        there = layer(target)
        if source.package == "zeropp" and target.startswith("megatron_zpp"):
            yield f"{line}: imports {target}; zeropp must be usable without megatron_zpp"
        elif there < here:
            yield (
                f"{line}: imports {target} of the layer '{LAYERS[there][0]}' above its own, "
                f"'{LAYERS[here][0]}'; imports go down only"
            )


def late_imports(source: Source, known: Mapping[str, Source]) -> Iterator[str]:
    """Imports of our own modules inside functions: they hide cycles."""
    if source.package == "tests":
        return
    for function in _functions(source):
        for line, target in source.imports(known, inside=function):
            yield f"{line}: imports {target} inside {function.name}(); import at the top"


def cycles(known: Mapping[str, Source]) -> list[str]:
    """One line for each circle of modules that import each other."""
    graph = {
        name: sorted({to for _, to in source.imports(known) if to in known and to != name})
        for name, source in known.items()
        if source.package in PACKAGES
    }
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            found.setdefault(frozenset(circle), " -> ".join([*circle, name]))
        elif name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return list(found.values())


def global_statements(source: Source) -> Iterator[str]:
    """`global`."""
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}; pass it as an argument instead"


def mutable_module_state(source: Source) -> Iterator[str]:
    """Lists, dicts and sets of a module that are not constants, or that are changed anywhere."""
    if source.package == "tests":
        return
    mutable = {}
    for node in source.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and _is_mutable(getattr(node, "value", None)):
                mutable[target.id] = node.lineno
    for name, line in mutable.items():
        if not re.fullmatch(r"_{0,2}[A-Z][A-Z0-9_]*|__all__", name):
            yield f"{line}: {name} is mutable state of a module; make it a CONSTANT or an argument"
    for line, name in _changes(source):
        if name in mutable:
            yield f"{line}: changes {name}, which belongs to the module; nothing may remember there"


def environment(source: Source) -> Iterator[str]:
    """Reading or writing the environment outside the one place for it."""
    if source.module in (READS_ENVIRONMENT, "setup") or source.package in ("tests", "benchmarks"):
        return
    words = ("environ", "environb", "getenv", "putenv", "unsetenv")
    for node in source.nodes:
        is_use = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
        names = [node.attr] if is_use else []
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        for name in names:
            if name in words:
                yield f"{node.lineno}: uses os.{name}; that belongs in zeropp/ranks/topology.py"


def private_fsdp(source: Source) -> Iterator[str]:
    """Names that FSDP2 does not promise to keep, outside the one place for them."""
    if source.module == KNOWS_FSDP or source.package == "tests":
        return
    for node in source.nodes:
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level and "torch" in (node.module or ""):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        for name in names:
            if FSDP_PRIVATE.fullmatch(name):
                yield f"{node.lineno}: uses FSDP2's {name}; that belongs in zeropp/fsdp_adapter.py"


def patched_torch(source: Source) -> Iterator[str]:
    """Assignments to attributes of what was imported from torch."""
    imported = set()
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", None)
            for alias in node.names:
                if (base or alias.name).partition(".")[0] == "torch":
                    imported.add(alias.asname or alias.name.partition(".")[0])
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in imported:
                yield f"{node.lineno}: changes {ast.unparse(node)}; torch is used, never patched"


def swallowed_exceptions(source: Source) -> Iterator[str]:
    """Handlers that catch everything, or that do nothing with what is not a named, narrow error."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler):
            name = ast.unparse(node.type) if node.type else ""
            silent = all(isinstance(one, ast.Pass | ast.Continue) for one in node.body)
            if not name or (silent and name in ("Exception", "BaseException")):
                yield f"{node.lineno}: 'except {name}' hides mistakes; name the error and handle it"


def sizes(source: Source) -> Iterator[str]:
    """Files, functions, lines and argument lists that are too long, and names that say nothing."""
    lines = source.text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{len(lines)}: {len(lines)} lines; at most {MAX_FILE_LINES}: split it by subject"
    if source.module.rpartition(".")[2] in ("utils", "util", "helpers", "misc", "common"):
        yield "1: name the file after the one thing it is about"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield f"{number}: {len(line)} columns; at most {MAX_COLUMNS}"
    for function in _functions(source):
        place = f"{function.lineno}: {function.name}()"
        length = function.end_lineno - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{place} has {length} lines; at most {MAX_FUNCTION_LINES}"
        taken = [*function.args.posonlyargs, *function.args.args]
        count = len(taken) - bool(taken and taken[0].arg in ("self", "cls"))
        if count > MAX_POSITIONAL:
            yield (
                f"{place} takes {count} positional arguments; at most {MAX_POSITIONAL}: "
                "make them keyword-only or a dataclass"
            )


def _functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in source.nodes if isinstance(node, kinds)]


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    comprehensions = ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, ast.List | ast.Dict | ast.Set | comprehensions)


def _changes(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) wherever `name[...]`, `name += ...` or `name.append(...)` changes a name."""
    for node in source.nodes:
        changed = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = node.value
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in MUTATING else None
        if isinstance(changed, ast.Name):
            yield node.lineno, changed.id
