"""The benchmarks of MixZ++ on small models: what crosses nodes, and what memory is taken."""

import json
import subprocess
import sys

import pytest
from benchmarks.cluster.crew import Refused

from benchmarks.cluster.mixz import require_agreement
from tests.benchmarks.cluster.namespaces import needs_namespaces
from tests.launched import ROOT, zeropp

SECONDS = 300  # some 15 on an idle machine of 2 cores


@needs_namespaces
def test_frozen_weights_cross_once_with_hpz(tmp_path):
    found = tmp_path / "found.json"
    command = "benchmarks/cluster/mixz.py --layers 2 --hidden 256 --heads 4 --seq 16 --vocab 64 --steps 3 "
    command += f"--tokens 3 --json {found}"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    exact, stored, kept = json.loads(found.read_text())["rows"]
    frozen = 2 * 2 * 12 * 256**2  # bf16 bytes of two blocks' matrices
    # Each node sends half of what there is to each gather, forward and backward: M in bf16.
    assert exact["later_step"] > frozen and stored["later_step"] < 0.6 * exact["later_step"]
    assert kept["later_step"] < kept["first_step"] - 0.2 * frozen
    assert kept["later_token"] < 0.01 * stored["later_token"]
    assert stored["held_bytes"] < 0.52 * exact["held_bytes"]


@pytest.mark.parametrize("flag", ["--steps", "--tokens"])
def test_one_of_each_is_too_few(flag):
    done = subprocess.run(
        [sys.executable, "benchmarks/cluster/mixz.py", flag, "1"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        1, f"error: {flag} 1: the first is shown apart: give 2\n"
    )  # fmt: skip


def test_different_models_are_not_compared():
    steps = {"one": [{"loss": 4.0}], "other": [{"loss": 4.1}]}
    with pytest.raises(Refused, match="different models"):
        require_agreement(steps)


def test_the_account_and_the_system_agree(tmp_path):
    command = zeropp(2, "benchmarks/memory/frozen_memory.py", "--layers 8 --hidden 2048")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes_bf16"] == 8 * 2048**2 and found["share"] < 0.52
    # 32 MiB of shards; what else a process takes or gives back meanwhile is a few.
    assert found["resident_bf16"] - found["resident_int8"] == pytest.approx(
        found["bytes_bf16"] - found["bytes_int8"], abs=4 * 2**20
    )
    assert found["loading_peak"] > found["bytes_int8"]
