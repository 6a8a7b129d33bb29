"""Each capability has one home, and little elsewhere names it; rooms do not grow.

The counts and lines below are ceilings that only fall: a change that lowers one lowers it here. A
later capability brings an allowance of its own.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("zeropp", "megatron_zpp")
OUTER = ("megatron_zpp/planner", "megatron_zpp/interchange", "zeropp/deepspeed")
# Of each capability: how it may be named, its homes, and how many files elsewhere may name it: of
# the core, and of each of the outer rooms, one number if it is that of all.
HOMES = {
    "muon": (
        r"muon|newton.?schulz|orthogonali",
        ("zeropp/capabilities/muon", "megatron_zpp/capabilities/muon"),
        (0, 3, 1, 2),
    ),
    "local SGD": (
        r"local.?steps|local.?sgd|diloco|\bouter_(lr|momentum|group|mean)|sync_every"
        r"|(?<!torch)elastic",
        ("zeropp/capabilities/local_sgd", "megatron_zpp/capabilities/local_sgd"),
        (6, 3, 0, 0),
    ),
    "LoRA and MixZ++": (
        # But q_lora_rank and kv_lora_rank, widths of latent attention, and zeropp/fsdp_adapter.
        r"(?<!q_)(?<!kv_)lora|mixz|nontrainable|(?<!fsdp_)adapter",
        (
            "zeropp/capabilities/mixz",
            "megatron_zpp/capabilities/lora",
            "megatron_zpp/interchange/adapters",
        ),
        (5, 3, 3, 4),
    ),
    "offload": (
        r"offload|master_weights|delayed.?(param|update)",
        ("zeropp/capabilities/offload", "megatron_zpp/capabilities/offload"),
        (6, 4, 0, 4),
    ),
    "incremental weight updates": (
        r"weight_steps|gather_changes|requantize|incremental.?(weight.?)?update",
        ("zeropp/capabilities/incremental_updates",),
        (4, 1, 0, 0),  # three of an op and its kernel in zeropp.quant, and one that loads kernels
    ),
    "experts": (
        r"expert|moe",
        ("megatron_zpp/capabilities/experts", "zeropp/capabilities/experts"),
        (13, 4, 4, 3),
    ),
}
# Lines of Python of each room, without the rooms in it that have a ceiling of their own.
LINES = {
    "zeropp": 22_848,
    "zeropp/deepspeed": 4_331,
    "megatron_zpp": 24_494,
    "megatron_zpp/planner": 5_450,
    "megatron_zpp/interchange": 6_583,
    "benchmarks": 10_990,
    "tests": 52_091,
}
# How many parameters and fields of a room, but not of rooms in it, are a whole `Config`.
WHOLE_CONFIGURATION = {"megatron_zpp": 9, "megatron_zpp/planner": 8}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def is_in(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def files_of(room: str, rooms: Mapping[str, int]) -> list[Path]:
    """Return the files of a room that are in none of `rooms` inside it."""
    inner = tuple(other for other in rooms if other.startswith(f"{room}/"))
    return [path for path in python_files(room) if not is_in(path, inner)]


@pytest.mark.parametrize("capability", HOMES)
def test_little_outside_its_home_names_a_capability(capability: str) -> None:
    pattern, homes, (most_in_core, *most_in_outer) = HOMES[capability]
    naming = [
        path
        for package in PACKAGES
        for path in python_files(package)
        if re.search(pattern, path.read_text(), re.IGNORECASE) and not is_in(path, homes)
    ]
    in_core = [str(path.relative_to(ROOT)) for path in naming if not is_in(path, OUTER)]
    assert len(in_core) <= most_in_core, in_core
    for room, most in zip(OUTER, len(OUTER) * most_in_outer, strict=False):
        of_room = [str(path.relative_to(ROOT)) for path in naming if is_in(path, (room,))]
        assert len(of_room) <= most, of_room


@pytest.mark.parametrize("room", LINES)
def test_a_room_does_not_grow(room: str) -> None:
    lines = sum(path.read_text().count("\n") for path in files_of(room, LINES))
    assert lines <= LINES[room], f"{room}: {lines:,} lines, {LINES[room]:,} at most"


def test_names_that_capabilities_declare_are_on_the_page_and_read() -> None:
    """A constant in upper case that nobody asks for would have no effect."""
    texts = {path: path.read_text() for name in PACKAGES for path in python_files(name)}
    source = "\n".join(texts.values())
    readers = r"(?:declared|_of_capabilities|require_none_of)"
    asked = set(re.findall(readers + r'\(\s*"([A-Z_]+)"', source))
    page = (ROOT / "docs/add_a_capability.md").read_text().partition("| Constant |")[2]
    assert set(re.findall(r"`([A-Z_]+)`", page)) == asked
    for path in texts:
        if "capabilities" in path.parts and path.stem in ("settings", "copies", "layer", "log"):
            for name in re.findall(r"^([A-Z][A-Z_]+)(?:, \w+)* = ", texts[path], re.MULTILINE):
                assert name in asked or len(re.findall(rf"\b{name}\b", source)) > 1, (path, name)


@pytest.mark.parametrize("room", WHOLE_CONFIGURATION)
def test_functions_take_the_sections_that_they_read(room: str) -> None:
    texts = {path: path.read_text() for path in files_of(room, WHOLE_CONFIGURATION)}
    taking = [path for path, text in texts.items() for _ in re.findall(r'\w: "?Config\b', text)]
    assert len(taking) <= WHOLE_CONFIGURATION[room], taking
