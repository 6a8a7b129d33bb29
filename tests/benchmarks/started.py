"""Runs benchmarks as a person does, as modules from the clone's root."""

import subprocess
import sys

from tests.launched import ROOT

SECONDS = 300


def run_benchmark(module: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess:
    """Run `python -m benchmarks.MODULE`; fails with its errors unless it exits with `status`."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == status, done.stderr
    return done
