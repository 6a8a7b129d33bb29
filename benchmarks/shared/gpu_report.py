"""The Markdown that benchmarks/gpu.py leaves: the machine, each step, what did not run and why."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared.limited import Done

from setup import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "bitsandbytes", "torchao", "numpy", "pytest")
TAIL, NAMED = 40, 20  # lines of an output that failed; tests that are named
Told = Callable[[Done], tuple[str, str | None]]  # a step's text, and its status if not "ok"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a step; `status` is "ok", "not run", or what went wrong."""

    title: str
    command: str
    status: str
    body: str
    seconds: float | None = None
    limit: float | None = None


@dataclass(kw_only=True)
class State:
    """How far the run is."""

    command: str
    facts: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    waiting: Sequence[str] = ()


def facts(device: str | None, commit: str | None) -> tuple[str, dict[str, str]]:
    """The device that is used, "cuda" or "cpu", and what machine and software there are.

    Asked of other processes, so that no GPU's memory is held here.
    """
    asked = subprocess.run(
        [sys.executable, "-c", "import json\nfrom benchmarks.shared.surroundings import surroundings\n"
         "import torch\nprint(json.dumps([surroundings(), torch.version.cuda]))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    around, cuda = json.loads(asked.stdout.splitlines()[-1])
    changed = ", with changes" if around["uncommitted"] else ""
    known = commit or (around["commit"] + changed if around["commit"] else "unknown: no git clone")
    machine = around["machine"]
    device = device or ("cuda" if machine["gpus"] else "cpu")
    return device, {
        "date": around["date"],
        "commit": known,
        "GPU": (_told("nvidia-smi", "--query-gpu=name,memory.total,power.limit,clocks.max.sm",
                      "--format=csv,noheader") or "none") if device == "cuda" else "not used",
        "driver": _told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or "no nvidia-smi",
        "CUDA": f"{cuda or 'none'} of torch; {_nvcc()}",
        "processor": f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB",
        "Python": f"{around['versions']['python']}, {around['versions']['system']}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "load": f"{around['load']['before']:.1f} at the start",
    }  # fmt: skip


def report(state: State) -> str:
    """The whole file."""
    facts = state.facts
    lines = [f"# GPU tests and benchmarks, {facts['date'][:10]}", "", f"`{state.command}`", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    lines += ["", "| step | result | seconds | limit |", "|---|---|---|---|"]
    for one in state.outcomes:
        times = ("", "") if one.seconds is None else (f"{one.seconds:.0f}", f"{one.limit:.0f}")
        lines.append(f"| {one.title} | {one.status} | {times[0]} | {times[1]} |")
    lines += [f"| {title} | not reached yet | | |" for title in state.waiting]
    for one in state.outcomes:
        lines += ["", f"## {one.title}", "", f"`{one.command}`", "", one.body]
    return "\n".join(lines) + "\n"


def output(done: Done) -> tuple[str, str | None]:
    """What a step printed, and the end of its errors unless it ended well."""
    parts = [_fenced(done.out)] if done.out.strip() else []
    if done.status != 0:
        parts.append(f"{_ending(done)} The end of its standard error:")
        parts.append(_fenced(_tail(done.err)))
    return "\n\n".join(parts) or "It printed nothing.", None


def compiled(done: Done) -> tuple[str, str | None]:
    """The end of what a build says if something is wrong; setuptools only warns of some of it."""
    said = done.out + done.err
    if done.status == 0 and "failed" not in said:
        return "It was built.", None
    return f"{_ending(done)}\n\n{_fenced(_tail(said))}", None


def counted(xml: Path, some_must_run: bool, done: Done) -> tuple[str, str | None]:
    """How many tests passed, failed and were skipped, and why."""
    if not xml.exists():
        return f"{_ending(done)}\n\n{_fenced(_tail(done.out + done.err))}", "no result"
    counts, skipped, bad = Counter(), Counter(), []
    for case in ElementTree.parse(xml).getroot().iter("testcase"):
        kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        kind = kinds[0] if kinds else "passed"
        counts[kind] += 1
        if kind == "skipped":
            skipped[case.find(kind).get("message", "no reason given")] += 1
        elif kind != "passed":
            first = (case.find(kind).get("message") or "").splitlines() or [""]
            bad.append(f"- {kind}: `{case.get('classname')}::{case.get('name')}`: {first[0][:200]}")
    told = [f"{counts['passed']} passed, {counts['failure']} failed, {counts['error']} errors, "
            f"{counts['skipped']} skipped."]  # fmt: skip
    told += [f"- skipped, {count} x: {reason}" for reason, count in skipped.most_common()]
    told += bad[:NAMED] + [f"- and {len(bad) - NAMED} more"] * (len(bad) > NAMED)
    if bad:
        told += ["", _fenced(_tail(done.out))]
    return "\n".join(told), None if counts["passed"] or not some_must_run else "all skipped"


def _ending(done: Done) -> str:
    return "Its time was up." if done.status is None else f"It ended with status {done.status}."


def _fenced(text: str) -> str:
    return "```\n" + text.strip("\n").replace("```", "'''") + "\n```"


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL:])


def _told(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def _nvcc() -> str:
    """The version of the compiler that setup.py finds."""
    nvcc = find_nvcc()
    found = re.search(r"V([\d.]+)", _told(nvcc, "--version") or "") if nvcc else None
    return f"nvcc {found[1]}" if found else "no nvcc"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
