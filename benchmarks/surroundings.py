"""What a reader needs to judge measured numbers: date, commit, machine, versions, load."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("zeropp", "megatron_zpp", "benchmarks", "csrc")


def surroundings() -> dict:
    """Date, commit, machine, versions and load, as JSON; `load` is the one-minute average."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", *SOURCES], capture_output=True, text=True
    )
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "uncommitted": changed.stdout.splitlines(),
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
