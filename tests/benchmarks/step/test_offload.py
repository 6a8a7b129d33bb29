"""The benchmark of the offloaded optimizer, with a tiny model on the CPU."""

import json

from tests.benchmarks.started import run_benchmark


def test_both_parts_run(tmp_path):
    path = tmp_path / "result.json"
    ranks = "--device cpu --rounds 2 --turns 1 --ranks 1 2 --parameters 1"
    shape = "--layers 1 --hidden 32 --heads 2 --seq 16 --vocab 64"
    done = run_benchmark("step.offload", *f"{ranks} {shape} --json {path}".split())
    result = json.loads(path.read_text())
    assert [len(row["seconds"]) for row in (*result["train"], *result["ranks"])] == [2] * 5
    assert "on the host, beside the next step" in done.stdout
