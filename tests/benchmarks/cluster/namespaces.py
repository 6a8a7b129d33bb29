"""What tests of emulated clusters share: whether they can run, and the namespaces of a run."""

import os
import subprocess
import time
from collections.abc import Callable

import pytest

from benchmarks.cluster.network.emulation import require_namespaces
from zeropp.errors import InputError


def why_impossible() -> str:
    """Why no namespace can be created here; empty if one can."""
    try:
        require_namespaces()
    except InputError as reason:
        return str(reason)
    name = f"zeropp-{os.getpid()}-trial"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode != 0:
        return done.stderr.strip()
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


REASON = why_impossible()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON or "possible")


def namespaces_of(process: int) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in listed.stdout.splitlines() if line}
    return {name for name in names if name.startswith(f"zeropp-{process}-")}


def wait_until(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)
