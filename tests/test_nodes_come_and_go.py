"""Nodes that step alone, each a launch of its own: SIGKILL to one, and another in its place."""

import json
import re
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.launched import LAUNCH, ROOT, kill_all, launching
from tests.saved_weights import saved_weights

MODEL_FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--eval-iters 0 --lr 1e-3 --micro-batch-size 1 --global-batch-size 4 --train-iters 1000000 "
)
INTERVAL = 4  # of exchanges; checkpoints are saved after every second one


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_without_the_node_that_is_killed_and_with_the_one_that_joins(
    tmp_path: Path,
) -> None:
    """The first node is killed, with rank 0 and the checkpoints' writer; nothing is rolled back."""
    with launching(tmp_path) as run:
        _, kept = run([*LAUNCH, "--keep_store", "0"])
        port = wait_for(r"nodes meet at \S+:(\d+)", kept)
        start = starter(run, tmp_path, port)
        launches = [start(), start()]
        for _, log in launches:
            wait_for(r"saved checkpoint \S+", log)
        # Who comes first is node 0.
        launches.sort(key=lambda launch: "/node_1/" in launch[1].read_text())
        (first, _), (second, log) = launches
        kill_all(first)
        _, third_log = start()
        wait_for(r"node 0 ended, 1 go on: node 1", log)
        wait_for(r"node 0 joined, 2 go on: nodes 1, 0", log)
        joined = int(wait_for(r"iteration +(\d+)/[^\n]*global batch size: +4 ", third_log))
        wait_for(rf"saved checkpoint \S+node_1/iter_0*{last_save(joined)}\n", log)
        wait_for(rf"saved checkpoint \S+save/iter_0*{last_save(joined)}\n", third_log)
        kill_all(second)
        require_alike(tmp_path / "save", last_save(joined))
    steps = re.findall(r"iteration +(\d+)/.*size: +(\d+) ", log.read_text())
    assert [int(number) for number, _ in steps] == [*range(1, len(steps) + 1)]
    assert [size for size, _ in groupby(size for _, size in steps)] == ["4", "2", "4"]
    lines = (tmp_path / "curves" / "metrics.jsonl").read_text().splitlines()
    curve = [json.loads(line)["iteration"] for line in lines]
    missing = set(range(1, joined)).difference(curve)  # since the last exchange of the first one
    assert curve == sorted(set(curve)) and len(missing) <= INTERVAL and curve[-1] > joined


def starter(run: Callable, folder: Path, port: str) -> Callable:
    """Return what starts a node of two ranks."""
    zeropp = {"sync_every": INTERVAL, "sync_store": f"127.0.0.1:{port}", "sync_nodes": 2}
    settings = {"zero_optimization": {"stage": 3}, "zeropp": zeropp}
    (folder / "zeropp.json").write_text(json.dumps(settings))
    flags = (
        f"{MODEL_FLAGS} --save-interval {2 * INTERVAL} --save {folder}/save --load {folder}/save "
        f"--deepspeed_config {folder}/zeropp.json --tensorboard-dir {folder}/curves"
    )
    command = [*LAUNCH, "--num_ranks", "2", str(ROOT / "pretrain_gpt.py"), *flags.split()]
    return lambda: run(command)


def wait_for(pattern: str, log: Path, seconds: float = 90) -> str:
    """Wait for a pattern in a log; return its first group, or all of it."""
    deadline = time.monotonic() + seconds
    while not (match := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, f"{pattern} never came:\n{log.read_text()}"
        time.sleep(0.05)
    return match[match.lastindex or 0]


def last_save(joined: int) -> int:
    """Return the second iteration from `joined` on at which checkpoints are saved."""
    every = 2 * INTERVAL
    return (joined // every + 2) * every


def require_alike(folder: Path, iteration: int) -> None:
    """Require that both nodes have saved the same weights, to the bit."""
    own, other = (
        saved_weights(path / f"iter_{iteration:07}") for path in (folder, folder / "node_1")
    )
    assert own.keys() == other.keys() != set()
    assert all(torch.equal(own[name], other[name]) for name in own)
