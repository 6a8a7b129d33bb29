"""What tests of emulated clusters share: whether there can be any, and what a run has made."""

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from benchmarks.cluster.emulation import require_means
from zeropp.errors import InputError


def why_impossible() -> str:
    """Why no namespace can be made here; empty if one can."""
    try:
        require_means()
    except InputError as reason:
        return str(reason)
    name = f"zeropp-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


IMPOSSIBLE = why_impossible()
needs_namespaces = pytest.mark.skipif(bool(IMPOSSIBLE), reason=IMPOSSIBLE or "possible")


def namespaces_of(process: int) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in listed.stdout.splitlines() if line}
    return {name for name in names if name.startswith(f"zeropp-{process}-")}


def wait_until(true: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
