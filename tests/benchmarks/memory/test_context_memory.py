"""What ranks keep of a sequence that they share."""

import json

from tests.benchmarks.started import run_benchmark


def test_two_ranks_keep_half_of_a_sequence_each():
    flags = "--seq-length 1024 --ranks 1 2 --json -"
    done = run_benchmark("memory.context_memory", *flags.split())
    whole, exchanged, gathered = json.loads(done.stdout)["rows"]
    assert [row["kind"] for row in (whole, exchanged, gathered)] == ["a2a", "a2a", "allgather"]
    assert 0.5 <= exchanged["saved"] / whole["saved"] < 0.55
    assert 0.5 < gathered["saved"] / whole["saved"] < 0.65
