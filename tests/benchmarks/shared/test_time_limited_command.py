"""Commands with a time limit: what ends with them, and what cannot start."""

import sys
import time
from pathlib import Path

from benchmarks.shared.time_limited_command import run_with_limit


def test_all_that_a_command_started_ends_with_it(tmp_path: Path) -> None:
    text = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    result = run_with_limit([sys.executable, "-c", text], {}, tmp_path / "log", 3.0)
    assert result.status is None
    stat = Path(f"/proc/{int(result.out)}/stat")
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_command_that_is_not_there_fails(tmp_path: Path) -> None:
    result = run_with_limit(["no-such-program"], {}, tmp_path / "log", 5.0)
    assert result.status == 127 and "no-such-program" in result.err
