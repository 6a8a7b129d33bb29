"""The structure of the project: what may import what, how long things get, where state may live."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import structure
from tests.structure import LAYERS, Source, cycles, layer, read_sources

ROOT = Path(__file__).resolve().parent.parent
SOURCES = read_sources(ROOT)

GRAPH_RULES = (structure.wrong_direction, structure.late_imports)
FILE_RULES = (
    structure.global_statements,
    structure.mutable_module_state,
    structure.environment,
    structure.private_fsdp,
    structure.patched_torch,
    structure.swallowed_exceptions,
    structure.sizes,
)


def findings(rule: Callable[..., Iterator[str]], sources: dict[str, Source]) -> list[str]:
    """What a rule finds, as `path:line: what`."""
    lines = []
    for source in sources.values():
        extra = (sources,) if rule in GRAPH_RULES else ()
        path = source.module.replace(".", "/") + ("/__init__.py" if source.is_package else ".py")
        lines += [f"{path}:{found}" for found in rule(source, *extra)]
    return lines


@pytest.mark.parametrize("rule", GRAPH_RULES + FILE_RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Callable[..., Iterator[str]]) -> None:
    found = findings(rule, SOURCES)
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not cycles(SOURCES), "\n".join(cycles(SOURCES))


def test_every_layer_and_every_package_is_seen() -> None:
    assert {"zeropp", "megatron_zpp", "tests", "tools"} <= {one.package for one in SOURCES.values()}
    assert "zeropp.settings.zero_config" in SOURCES and "pretrain_gpt" in SOURCES
    missing = [name for name in SOURCES if name.startswith("zeropp") and layer(name) < 0]
    assert not missing


def test_the_longest_name_decides_the_layer() -> None:
    def name(module: str) -> str:
        return LAYERS[layer(module)][0]

    assert name("zeropp") == "zeropp's face"
    assert name("zeropp.settings.zero_config") == name("zeropp.settings.json_file") == "base"
    assert name("zeropp.optim.step") == name("zeropp.something_new") == "sharding"
    assert name("megatron_zpp.data.loader") == "building"
    assert name("megatron_zpp.something_new") == "around training"
    assert layer("pretrain_gpt") == -1


def project(**texts: str) -> dict[str, Source]:
    """Sources by module name, "__" for dots."""
    names = {key.replace("__", "."): text for key, text in texts.items()}
    return {name: Source(name, text, is_package="." not in name) for name, text in names.items()}


@pytest.mark.parametrize(
    ("rule", "sources", "where", "what"),
    [
        (
            structure.wrong_direction,
            project(zeropp__errors="from zeropp.sharding.shard import shard", zeropp__stages=""),
            "zeropp/errors.py:1",
            "'sharding' above its own, 'base'",
        ),
        (
            structure.wrong_direction,
            project(zeropp="from megatron_zpp.settings.config import x", megatron_zpp__config=""),
            "zeropp/__init__.py:1",
            "usable without megatron_zpp",
        ),
        (
            structure.wrong_direction,
            project(zeropp__topology="\nfrom . import stages", zeropp__stages=""),
            "zeropp/ranks/topology.py:2",
            "imports zeropp.sharding.shard",
        ),
        (
            structure.wrong_direction,
            project(megatron_zpp__model__gpt="import megatron_zpp.train.loop", megatron_zpp__train=""),
            "megatron_zpp/model/gpt.py:1",
            "'training' above its own, 'building'",
        ),
        (
            structure.late_imports,
            project(zeropp__stages="def f():\n    from zeropp import errors", zeropp__errors=""),
            "zeropp/sharding/shard.py:2",
            "imports zeropp.errors inside f()",
        ),
        (
            structure.global_statements,
            project(zeropp__stages="x = 1\ndef f():\n    global x"),
            "zeropp/sharding/shard.py:3",
            "global x",
        ),
        (
            structure.mutable_module_state,
            project(zeropp__stages="groups = {}"),
            "zeropp/sharding/shard.py:1",
            "groups is mutable state",
        ),
        (
            structure.mutable_module_state,
            project(zeropp__stages="import collections\n"
                    "SEEN: dict = collections.defaultdict(list)\ndef f(x):\n    SEEN[x] = 1"),
            "zeropp/sharding/shard.py:4",
            "changes SEEN",
        ),
        (
            structure.mutable_module_state,
            project(zeropp__stages="_ALL = []\ndef f(x):\n    _ALL.append(x)"),
            "zeropp/sharding/shard.py:3",
            "changes _ALL",
        ),
        (
            structure.environment,
            project(megatron_zpp__main="import os\nx = os.environ['RANK']"),
            "megatron_zpp/train/pretrain.py:2",
            "os.environ",
        ),
        (
            structure.environment,
            project(tools__x="from os import getenv"),
            "tools/x.py:1",
            "os.getenv",
        ),
        (
            structure.private_fsdp,
            project(zeropp__stages="def f(m):\n    return m._fsdp_param_group"),
            "zeropp/sharding/shard.py:2",
            "_fsdp_param_group",
        ),
        (
            structure.private_fsdp,
            project(zeropp__stages="from torch.distributed.fsdp._fully_shard import _fsdp_api"),
            "zeropp/sharding/shard.py:1",
            "_fully_shard",
        ),
        (
            structure.patched_torch,
            project(zeropp__stages="from torch import nn\nnn.Linear.forward = None"),
            "zeropp/sharding/shard.py:2",
            "nn.Linear.forward",
        ),
        (
            structure.swallowed_exceptions,
            project(zeropp__stages="try:\n    x = 1\nexcept Exception:\n    pass"),
            "zeropp/sharding/shard.py:3",
            "hides mistakes",
        ),
        (
            structure.sizes,
            project(zeropp__stages="x = 1\n" * 401),
            "zeropp/sharding/shard.py:401",
            "401 lines; at most 400",
        ),
        (
            structure.sizes,
            project(zeropp__stages="def f():\n" + "    x = 1\n" * 60),
            "zeropp/sharding/shard.py:1",
            "f() has 61 lines",
        ),
        (
            structure.sizes,
            project(zeropp__stages="def f(a, b, c, d, e, f, /, g, h, *, i): ..."),
            "zeropp/sharding/shard.py:1",
            "8 positional arguments",
        ),
        (structure.sizes, project(zeropp__stages="#" * 101), "zeropp/sharding/shard.py:1", "101 columns"),
        (structure.sizes, project(zeropp__utils=""), "zeropp/utils.py:1", "name the file"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found_with_its_place(
    rule: Callable[..., Iterator[str]], sources: dict[str, Source], where: str, what: str
) -> None:
    found = findings(rule, sources)
    assert len(found) == 1 or rule is structure.private_fsdp
    assert found[0].startswith(where + ": ") and what in found[0], found


def test_a_circle_is_found() -> None:
    circle = project(
        zeropp__a="from zeropp.b import x",
        zeropp__b="import zeropp.c",
        zeropp__c="from . import a",
        zeropp__d="from zeropp.a import x",
    )
    assert cycles(circle) == ["zeropp.a -> zeropp.b -> zeropp.c -> zeropp.a"]
    assert not cycles({name: one for name, one in circle.items() if name != "zeropp.c"})


@pytest.mark.parametrize("rule", GRAPH_RULES + FILE_RULES, ids=lambda rule: rule.__name__)
def test_good_code_passes(rule: Callable[..., Iterator[str]]) -> None:
    good = project(
        zeropp__stages=(
            "import os\nfrom types import MappingProxyType\nfrom torch import nn\n"
            "from zeropp.errors import InputError\n"
            "BITS = (4, 8)\n_NAMES = {'a': 1}\n__all__ = ['f']\nlog = print\n"
            "TABLE = MappingProxyType({'a': [1]})\n"
            "class A(nn.Module):\n    def __init__(self, a, b, c, d, e, f, g):\n"
            "        self.seen = []\n        self.seen.append(_NAMES['a'])\n"
            "def f(path):\n    import wandb\n    found = {}\n    found['x'] = os.path.join(path)\n"
            "    try:\n        return wandb\n    except OSError as e:\n        raise InputError\n"
        ),
        zeropp__errors="class InputError(ValueError): ...",
    )
    assert findings(rule, good) == []
