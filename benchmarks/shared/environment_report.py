"""What a reader needs to judge measured numbers: date, commit, machine, versions, load."""

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("zeropp", "megatron_zpp", "benchmarks", "csrc")


def surroundings() -> dict:
    """Date, commit, machine, versions and load, as JSON; `load` is the one-minute average."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD").strip() or None,
        "uncommitted": _git("status", "--porcelain", "--", *SOURCES).splitlines(),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(memory / 2**30, 1),
            "gpus": gpus,
        },
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "load": {"before": os.getloadavg()[0]},
    }


def processor() -> str:
    """The processor's model, and the vector instructions torch uses."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _git(*arguments: str) -> str:
    """What git says of this clone; nothing where there is no git or no clone."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout
