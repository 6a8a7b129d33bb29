"""What a reader needs to judge measured numbers: date, commit, machine, versions and load."""

import os
import platform
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("zeropp", "megatron_zpp", "benchmarks", "csrc")


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
