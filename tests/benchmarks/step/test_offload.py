"""The benchmark of the offloaded optimizer runs, and copies count as hidden where kernels run."""

import json
import subprocess
import sys

import pytest
from benchmarks.step.copies import overlapped, union

from tests.launched import ROOT


def test_the_part_of_the_copies_that_kernels_cover():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlapped([(0, 4), (2, 6)], [(1, 2), (5, 9)]) == pytest.approx(2 / 6)
    assert overlapped([(0, 1)], []) == 0.0 and overlapped([], [(0, 1)]) == 1.0


def test_both_parts_run(tmp_path):
    found = tmp_path / "found.json"
    command = "benchmarks/step/offload.py --device cpu --rounds 2 --turns 1 --ranks 1 2 --parameters 1 "
    command += f"--layers 1 --hidden 32 --heads 2 --seq 16 --vocab 64 --json {found}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())
    assert [len(one["seconds"]) for one in (*result["train"], *result["ranks"])] == [2] * 5
    assert "on the host, beside the next step" in done.stdout
