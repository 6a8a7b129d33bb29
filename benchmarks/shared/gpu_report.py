"""The Markdown file that gpu_run writes: the machine, each step, and what did not run and why."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.shared.time_limited_command import INTERRUPTED, CommandResult
from setup import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "bitsandbytes", "torchao", "numpy", "pytest")
OUTPUT_LINES = 60  # of failed steps and of tests that are shown
FACT_SECONDS = 60  # that a program which describes the machine may take
# Asked of another process, so that this one holds no GPU memory.
ENVIRONMENT_PROGRAM = """
import json
import torch
from benchmarks.shared.result import environment_report
print(json.dumps([environment_report(), torch.version.cuda]))
"""

# Makes Markdown of a step's result; with its status if that is not the command's own.
Describe = Callable[[CommandResult], tuple[str, str | None]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a step; `status` is "ok", "not run", or what went wrong."""

    title: str
    command: str
    status: str
    body: str
    seconds: float | None = None
    limit: float | None = None


def machine_facts(device: str | None, commit: str | None) -> tuple[str, dict[str, str]]:
    """The device to use, "cuda" or "cpu", and a description of the machine and its software."""
    gpus = _nvidia_smi("name,memory.total,power.limit,clocks.max.sm")
    output = _output_of(sys.executable, "-c", ENVIRONMENT_PROGRAM) or ""
    if not output.endswith("]"):  # torch cannot be imported: the steps will say why
        known = {"date": f"{datetime.now():%Y-%m-%d}", "commit": commit or "unknown"}
        return device or ("cuda" if gpus else "cpu"), known | {"GPU": gpus or "none"}
    report, cuda = json.loads(output.rpartition("; ")[2])
    machine, versions = report["machine"], report["versions"]
    device = device or ("cuda" if machine["gpus"] else "cpu")
    if not commit and report["commit"]:
        commit = report["commit"] + (", with changes" if report["uncommitted"] else "")
    gpu = "not used"
    if device == "cuda":
        gpu = gpus or "none"
    return device, {
        "date": report["date"],
        "commit": commit or "unknown: not a git clone",
        "GPU": gpu,
        "driver": _nvidia_smi("driver_version") or "no nvidia-smi",
        "CUDA": f"{cuda or 'none'} of torch; {_nvcc_version()}",
        "processor": f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB",
        "Python": f"{versions['python']}, {versions['system']}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "load": f"{report['load']['before']:.1f} at the start",
    }


def markdown(
    command: str, facts: Mapping[str, str], outcomes: Sequence[Outcome], waiting: Sequence[str]
) -> str:
    """The whole file; `waiting` are the titles of steps that were not reached yet."""
    lines = [f"# GPU tests and benchmarks, {facts['date'][:10]}", "", f"`{command}`", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    lines += ["", "| step | result | seconds | limit |", "|---|---|---|---|"]
    for outcome in outcomes:
        times = " | "
        if outcome.seconds is not None:
            times = f"{outcome.seconds:.0f} | {outcome.limit:.0f}"
        lines.append(f"| {outcome.title} | {outcome.status} | {times} |")
    lines += [f"| {title} | not reached yet | | |" for title in waiting]
    for outcome in outcomes:
        lines += ["", f"## {outcome.title}", "", f"`{outcome.command}`", "", outcome.body]
    return "\n".join(lines) + "\n"


def describe_output(result: CommandResult) -> tuple[str, str | None]:
    """A step's output, and the end of its errors if it failed."""
    parts = [_fenced(result.out)] if result.out.strip() else []
    if result.status != 0:
        parts.append(f"{_ending(result)} The end of its standard error:")
        parts.append(_fenced(_last_lines(result.err)))
    return "\n\n".join(parts) or "It printed nothing.", None


def describe_build(result: CommandResult) -> tuple[str, str | None]:
    """The end of a build's output if something failed, which setuptools may report as a warning."""
    output = result.out + result.err
    if result.status == 0 and "failed" not in output:
        return "It was built.", None
    return f"{_ending(result)}\n\n{_fenced(_last_lines(output))}", None


def describe_tests(some_must_run: bool, result: CommandResult) -> tuple[str, str | None]:
    """The end of pytest's output: what failed, what was skipped and why, and how many passed."""
    output = _last_lines(result.out + result.err)
    status = "all skipped" if some_must_run and " passed" not in output else None
    return f"{_ending(result)}\n\n{_fenced(output)}", status


def _ending(result: CommandResult) -> str:
    if result.status in (None, INTERRUPTED):
        return "Its time was up." if result.status is None else "It was interrupted."
    return f"It ended with status {result.status}."


def _fenced(text: str) -> str:
    return "```\n" + text.strip("\n").replace("```", "'''") + "\n```"


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-OUTPUT_LINES:])


def _nvidia_smi(query: str) -> str | None:
    return _output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")


def _output_of(*command: str) -> str | None:
    """The lines that a command prints, joined by "; "; None without the command or any output."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=FACT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer of {command[0]} in {FACT_SECONDS} s"
    return "; ".join(done.stdout.split("\n")).strip("; ") or None


def _nvcc_version() -> str:
    """The version of the compiler that setup.py finds."""
    nvcc = find_nvcc()
    match = re.search(r"V([\d.]+)", _output_of(nvcc, "--version") or "") if nvcc else None
    return f"nvcc {match[1]}" if match else "no nvcc"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
