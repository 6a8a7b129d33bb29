"""A benchmark's result: what a reader needs to judge it, and the files that it is written to."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

from zeropp.atomic import write_atomically

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("zeropp", "megatron_zpp", "benchmarks", "csrc")


def begin(module: str) -> dict:
    """Start a benchmark's result with its command line and the environment it runs in.

    `module` is the benchmark's `__spec__.name`, the name that `python -m` takes.
    """
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    name = module.rpartition(".")[2]
    return {"benchmark": name, "command": command, **environment_report()}


def environment_report() -> dict:
    """Date, commit, machine, versions and load, as JSON; the load is the one-minute average."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "uncommitted": _git("status", "--porcelain", "--", *SOURCES).splitlines(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(memory / 2**30, 1),
            "gpus": gpus,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "load": {"before": os.getloadavg()[0]},
    }


def heading(result: dict) -> str:
    """Two lines: date and commit; machine, versions, and load."""
    machine, load = result["machine"], result["load"]
    changes = " + changes" if result["uncommitted"] else ""
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    gpus = " ".join(machine["gpus"]) or "no GPU"
    parts = [f"{machine['processor']}, {machine['cores']} cores, {gpus}", *versions]
    return (
        f"{result['date']}  commit {result['commit'] or 'unknown'}{changes}\n"
        f"{'; '.join(parts)}; load {load['before']:.1f} to {load['after']:.1f}"
    )


def page(result: dict, text: str) -> str:
    """A dated Markdown page for benchmarks/results/ with what a benchmark prints."""
    title = result["benchmark"].replace("_", " ").capitalize()
    facts = "\n".join(f"- {line}" for line in heading(result).splitlines())
    return f"# {title}, {result['date'][:10]}\n\n`{result['command']}`\n\n{facts}\n\n{text}\n"


def save(result: dict, target: str | None) -> None:
    """Write the JSON to a file; do nothing where `target` is None or "-"."""
    if target not in (None, "-"):
        write_text(target, json.dumps(result, indent=1) + "\n")


def write_text(path: Path | str, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))


def _processor() -> str:
    """The processor's model, and the vector instructions that PyTorch uses."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def _git(*arguments: str) -> str:
    """The output of a git command in this clone; empty if there is no git or no clone."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout
