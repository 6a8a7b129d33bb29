"""The instructions that a warp executes for a whole tile, by the disassembly of a kernel."""

import heapq
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeropp.errors import InputError

_LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?(\S+)(.*?);|^(\.L\S+):", re.MULTILINE)
_FP32 = ("FADD", "FMUL", "FFMA", "IMAD", "HADD2", "HFMA2")
_OTHER = ("U", "R2UR", "LD", "ST", "S2", "SHFL", "MUFU", "B", "EXIT", "NOP", "CALL", "RET", "WARP")


def nvdisasm(nvcc: str) -> str:
    """The path of CUDA's disassembler; raises InputError if there is none."""
    for folder in (os.environ.get("NVDISASM", ""), None, str(Path(nvcc).parent)):  # None: the PATH
        if found := shutil.which("nvdisasm", path=folder):
            return found
    raise InputError("there is no nvdisasm: set NVDISASM to a folder such as triton's nvidia/bin")


def executed(disassembly: str, wanted: Mapping[str, int]) -> list[str]:
    """The names of the shortest way through a kernel with so many of some instructions.

    A whole tile takes it: it has no narrow accesses, raw values, and ends of segments.
    """
    code, labels = [], {}
    for condition, name, operands, label in _LINE.findall(disassembly):
        if label:
            labels[label] = len(code)
            continue
        before, _, target = operands.partition("`(")
        ends = not condition and (name == "EXIT" or (name == "BRA" and not before.strip()))
        target = target.partition(")")[0] if name.startswith("BRA") else ""
        code.append((name, name.replace(".E", "", 1), target, ends))
    start = (0, tuple(wanted.values()))  # the index, and how many are left
    came, ways = {start: None}, [(0, start)]
    while ways:
        length, place = heapq.heappop(ways)
        name, kind, target, ends = code[place[0]]
        left = tuple(n - (each == kind) for each, n in zip(wanted, place[1], strict=True))
        if name == "EXIT" and not any(left):
            names = []
            while place:
                names.append(code[place[0]][0])
                place = came[place]
            return names
        following = [labels[target]] if target else []
        following += [] if ends else [place[0] + 1]
        for index in following if min(left) >= 0 else ():
            if index < len(code) and (index, left) not in came:
                came[index, left] = place
                heapq.heappush(ways, (length + 1, (index, left)))
    raise ValueError(f"no way has {dict(wanted)}")


def cycles(names: Sequence[str]) -> int:
    """Those of a scheduler: one of each instruction, two of those for the integer units."""
    integer = [name for name in names if not name.startswith(_FP32 + _OTHER)]
    return max(len(names), 2 * len(integer))
