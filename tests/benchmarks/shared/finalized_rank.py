"""A benchmark whose ranks fail if Python is finalized in them."""

import argparse
import atexit
import os
import sys

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.interleaved import Disagreement
from zeropp.ranks.topology import Environment

FINALIZED = 7  # a status


def on_rank(options: argparse.Namespace) -> list[int]:
    """Return the ranks that there are; fail where the environment asks for it."""
    atexit.register(os._exit, FINALIZED)
    environment = Environment.read()
    if "DISAGREES" in os.environ:
        raise Disagreement("a and b differ")
    return list(range(environment.world_size))


BENCHMARK = Benchmark(spec=__spec__, question=__doc__, measure=print, show=str, on_rank=on_rank)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
