"""The memory of frozen weights on a small model: our count beside the system's."""

import json

import pytest

from tests.benchmarks.started import run_benchmark


def test_our_count_and_the_systems_agree():
    flags = "--ranks 2 --layers 8 --hidden 2048 --json -"
    done = run_benchmark("memory.frozen_memory", *flags.split())
    result = json.loads(done.stdout)
    assert result["bytes_bf16"] == 8 * 2048**2 and result["share"] < 0.52
    # 32 MiB of shards; what else a process takes or gives back meanwhile is a few.
    assert result["resident_bf16"] - result["resident_int8"] == pytest.approx(
        result["bytes_bf16"] - result["bytes_int8"], abs=4 * 2**20
    )
    assert result["loading_peak"] > result["bytes_int8"]
