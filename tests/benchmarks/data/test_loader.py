"""The benchmark of the loader on a tiny model and dataset: it verifies, and prints its table."""

import json
from pathlib import Path

import numpy as np

from megatron_zpp.data.indexed_dataset import write_dataset
from tests.benchmarks.started import run_benchmark


def test_the_benchmark_runs(tmp_path: Path) -> None:
    write_dataset(tmp_path / "text", 50, ([np.arange(length) % 50] for length in range(1, 60)))
    flags = (
        f"--data-path {tmp_path}/text --split 1 --tokenizer-type NullTokenizer --vocab-size 50 "
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
        "--micro-batch-size 2 --lr 1e-3 --train-iters 20000"
    )
    path = tmp_path / "result.json"
    own = f"--workers 0 1 --rounds 2 --json {path}"
    done = run_benchmark("data.loader", *own.split(), "--", *flags.split())
    assert "batches equal" in done.stdout
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["steps"]] == ["in memory", "0 workers", "1 workers"]
    assert all(len(row["seconds"]) == len(row["waited"]) == 2 for row in result["steps"])
