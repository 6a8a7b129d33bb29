"""The table of losses at all sizes of the axes, for one of them."""

import json

from tests.benchmarks.started import run_benchmark


def test_the_losses_of_a_pipeline_are_those_of_one_rank():
    flags = "--ranks 2 --sizes pp2 --stages 3 --steps 2 --json -"
    done = run_benchmark("convergence.parallel_losses", *flags.split())
    rows = json.loads(done.stdout)["rows"]
    assert [(row["model"], row["sizes"], row["stage"]) for row in rows] == [
        ("GPT-2", "pp2", 3), ("Llama", "pp2", 3)
    ]  # fmt: skip
    assert all(row["losses"] < 1e-5 and row["norms"] < 1e-5 for row in rows)
