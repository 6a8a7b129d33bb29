"""The memory of frozen weights on a small model: our count beside the system's."""

import json
import subprocess

import pytest

from tests.benchmarks.started import SECONDS
from tests.launched import LAUNCH, ROOT


def test_our_count_and_the_systems_agree():
    launcher = [*LAUNCH, "--num_ranks", "2", "--module", "benchmarks.memory.frozen_memory"]
    done = subprocess.run(
        [*launcher, "--layers", "8", "--hidden", "2048"],
        cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bytes_bf16"] == 8 * 2048**2 and result["share"] < 0.52
    # 32 MiB of shards; what else a process takes or gives back meanwhile is a few.
    assert result["resident_bf16"] - result["resident_int8"] == pytest.approx(
        result["bytes_bf16"] - result["bytes_int8"], abs=4 * 2**20
    )
    assert result["loading_peak"] > result["bytes_int8"]
