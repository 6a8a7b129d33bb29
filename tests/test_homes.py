"""Each capability has one home, and little elsewhere names it; rooms do not grow.

The counts and lines below are ceilings that only fall: a change that lowers one lowers it here. A
later capability brings an allowance of its own.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTER = ("megatron_zpp/planner", "megatron_zpp/interchange", "zeropp/deepspeed")
# Of each capability: how it may be named, its homes, and how many files elsewhere may name it: of
# the core, and of each of the outer rooms.
HOMES = {
    "muon": (
        r"muon|newton.?schulz|orthogonali",
        ("zeropp/capabilities/muon", "megatron_zpp/capabilities/muon"),
        (0, 3),
    ),
    "local SGD": (
        r"local.?steps|local.?sgd|diloco|\bouter_(lr|momentum|group|mean)|sync_every"
        r"|(?<!torch)elastic",
        ("zeropp/capabilities/local_sgd", "megatron_zpp/capabilities/local_sgd"),
        (6, 3),
    ),
    "LoRA and MixZ++": (
        # But q_lora_rank and kv_lora_rank, widths of latent attention, and zeropp/fsdp_adapter.
        r"(?<!q_)(?<!kv_)lora|mixz|nontrainable|(?<!fsdp_)adapter",
        (
            "zeropp/capabilities/mixz",
            "megatron_zpp/capabilities/lora",
            "megatron_zpp/interchange/adapters",
        ),
        (5, 4),
    ),
    "offload": (
        r"offload|master_weights|delayed.?(param|update)",
        ("zeropp/capabilities/offload", "megatron_zpp/capabilities/offload"),
        (6, 4),
    ),
    "incremental weight updates": (
        r"weight_steps|gather_changes|requantize|incremental.?(weight.?)?update",
        ("zeropp/capabilities/incremental_updates",),
        (4, 1),  # three of an op and its kernel in zeropp.quant, and one that loads kernels
    ),
    "experts": (
        r"expert|moe",
        ("megatron_zpp/capabilities/experts", "zeropp/capabilities/experts"),
        (13, 4),
    ),
}
# Lines of Python of each room, without the rooms in it that have a ceiling of their own.
LINES = {
    "zeropp": 22_646,
    "zeropp/deepspeed": 4_333,
    "megatron_zpp": 24_885,
    "megatron_zpp/planner": 5_412,
    "megatron_zpp/interchange": 6_609,
    "benchmarks": 10_958,
    "tests": 53_410,
}


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def is_in(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


@pytest.mark.parametrize("capability", HOMES)
def test_little_outside_its_home_names_a_capability(capability: str) -> None:
    pattern, homes, (most_in_core, most_in_outer) = HOMES[capability]
    naming = [
        path
        for package in ("zeropp", "megatron_zpp")
        for path in python_files(package)
        if re.search(pattern, path.read_text(), re.IGNORECASE) and not is_in(path, homes)
    ]
    in_core = [str(path.relative_to(ROOT)) for path in naming if not is_in(path, OUTER)]
    assert len(in_core) <= most_in_core, in_core
    for room in OUTER:
        of_room = [str(path.relative_to(ROOT)) for path in naming if is_in(path, (room,))]
        assert len(of_room) <= most_in_outer, of_room


@pytest.mark.parametrize("room", LINES)
def test_a_room_does_not_grow(room: str) -> None:
    inner = tuple(other for other in LINES if other.startswith(f"{room}/"))
    files = [path for path in python_files(room) if not is_in(path, inner)]
    lines = sum(path.read_text().count("\n") for path in files)
    assert lines <= LINES[room], f"{room}: {lines:,} lines, {LINES[room]:,} at most"
