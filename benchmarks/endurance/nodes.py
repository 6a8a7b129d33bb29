"""Kills and joins of nodes that step alone, at random: does the run go on without a hand?

    python -m benchmarks.endurance.nodes [--minutes 30] [--nodes 3] [--ranks 1] [--json FILE]

Each node is a launch of its own, and a supervisor starts a new one for each that ended. At random
moments, one in a minute, all processes of a node are killed at once. Required are that the others
pass the step that they had reached within 30 s, that no node counts a step twice, and that nodes
that have saved the same iteration have the same weights, to the bit.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cluster.started_cluster import exit_on_signals
from benchmarks.shared.benchmark import Benchmark, Flag
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.table import Column, table
from tests.launched import LAUNCH, ROOT, kill_all, start
from tests.saved_weights import saved_weights

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--eval-iters 0 --lr 1e-3 --micro-batch-size 1 --train-iters 100000000 "
)
GOES_ON_SECONDS, START_SECONDS, POLL_SECONDS = 30.0, 300.0, 0.1
EVERY, SAVES, KEPT = 10, 50, 100  # steps between exchanges and checkpoints, and how many are kept
COLUMNS = (
    Column("after s", "at", ".0f"),
    Column("killed node", "killed"),
    Column("others went on after s", "goes_on", ".1f"),
    Column("successor joined after s", "joined", ".1f"),
)


class Cluster:
    """The launches of a run, each with its log."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.logs, self.nodes = folder, [], []
        self._options = options
        self.store, log = self._start([*LAUNCH, "--keep_store", "0"])
        port = wait_for(lambda: re.search(r"nodes meet at \S+:(\d+)", log.read_text()))[1]
        zeropp = {
            "sync_every": EVERY,
            "sync_store": f"127.0.0.1:{port}",
            "sync_nodes": options.nodes,
        }
        settings = {"zero_optimization": {"stage": 3}, "zeropp": zeropp}
        (folder / "zeropp.json").write_text(json.dumps(settings))

    def add(self) -> Path:
        """Start a node; return its log."""
        batch, save = self._options.nodes * self._options.ranks, f"{self.folder}/save"
        flags = (
            f"{MODEL} --global-batch-size {batch} --deepspeed_config {self.folder}/zeropp.json "
            f"--save-interval {SAVES} --keep-checkpoints {KEPT} --save {save} --load {save}"
        )
        script = [str(ROOT / "pretrain_gpt.py"), *flags.split()]
        process, log = self._start([*LAUNCH, "--num_ranks", str(self._options.ranks), *script])
        self.nodes.append((process, log))
        return log

    def end(self) -> None:
        """Kill everything."""
        for process, _ in [*self.nodes, (self.store, None)]:
            if process.poll() is None:
                kill_all(process)

    def require_alive(self) -> None:
        """Raise Disagreement if a node has ended by itself."""
        for process, log in self.nodes:
            if process.poll() is not None:
                raise Disagreement(f"a node has ended by itself:\n{log.read_text()[-4000:]}")

    def _start(self, command: list[str]) -> tuple:
        log = self.folder / f"log-{len(self.logs)}.txt"
        self.logs.append(log)
        return start(command, log, self.folder), log


def measure(options: argparse.Namespace, result: dict) -> None:
    """Kill nodes and start others; raise Disagreement where the run does not go on by itself."""
    exit_on_signals()
    draw, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory(prefix="zeropp-nodes-") as folder:
        cluster = Cluster(Path(folder), options)
        try:
            for log in [cluster.add() for _ in range(options.nodes)]:
                wait_for(lambda log=log: len(steps_of(log)) > EVERY)
            began = time.monotonic()
            while time.monotonic() - began < 60 * options.minutes:
                time.sleep(draw.uniform(0, options.pause))
                rows.append({"at": time.monotonic() - began, **replace_one(cluster, draw)})
                print(table(rows[-1:], *COLUMNS), file=sys.stderr, flush=True)
        finally:
            cluster.end()
        result["kills"] = rows
        result["seconds"] = time.monotonic() - began
        result["steps"] = max(max(steps_of(log)) for _, log in cluster.nodes)
        result["equal_checkpoints"] = compare(Path(folder) / "save")
        for log in cluster.logs[1:]:
            steps = steps_of(log)
            if steps != sorted(set(steps)):
                raise Disagreement(f"a node has taken a step twice:\n{log.read_text()[-4000:]}")


def replace_one(cluster: Cluster, draw: random.Random) -> dict:
    """Kill a node, wait until the others have passed their step, and start its successor."""
    place = draw.randrange(len(cluster.nodes))
    process, log = cluster.nodes.pop(place)
    number = re.findall(r"joined .* as node (\d+)", log.read_text())
    kill_all(process)
    killed, reached = time.monotonic(), [max(steps_of(other)) for _, other in cluster.nodes]
    successor = cluster.add()

    def all_went_on() -> bool:
        cluster.require_alive()
        others = zip(cluster.nodes, reached, strict=False)
        return all(max(steps_of(other)) > step + EVERY for (_, other), step in others)

    wait_for(all_went_on)
    goes_on = time.monotonic() - killed
    if goes_on > GOES_ON_SECONDS:
        raise Disagreement(f"the others went on after {goes_on:.1f} s, not {GOES_ON_SECONDS:.0f}")

    def has_joined() -> bool:
        cluster.require_alive()
        return len(steps_of(successor)) > EVERY

    wait_for(has_joined)
    return {
        "killed": number[0] if number else "of the first",
        "goes_on": goes_on,
        "joined": time.monotonic() - killed,
    }


def compare(folder: Path) -> int:
    """Return how many checkpoints are of several nodes; raise Disagreement if they differ."""
    folders, count = [folder, *folder.glob("node_*")], 0
    for name in {path.name for each in folders for path in each.glob("iter_*")}:
        saved = [saved_weights(each / name) for each in folders if (each / name).is_dir()]
        for other in saved[1:]:
            if any(not torch.equal(saved[0][key], other[key]) for key in saved[0]):
                raise Disagreement(f"nodes have saved other weights in {name}")
        count += len(saved) > 1
    return count


def steps_of(log: Path) -> list[int]:
    """Return the steps in a log."""
    return [int(number) for number in re.findall(r"iteration +(\d+)/", log.read_text())]


def wait_for(condition: Callable[[], object]) -> object:
    """Return what a condition returns once that is true; raises Disagreement if it takes long."""
    deadline = time.monotonic() + START_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Disagreement(f"the run does not go on: {START_SECONDS:.0f} s have passed")
        time.sleep(POLL_SECONDS)
    return value


def show(result: dict) -> str:
    """Say what was measured."""
    rows = result["kills"]
    slowest = max(row["goes_on"] for row in rows)
    return (
        f"{len(rows)} kills and as many joins in {result['seconds'] / 60:.0f} minutes, "
        f"{result['steps']} steps: no hand, no step taken twice. The others went on after "
        f"{slowest:.1f} s at most. In {result['equal_checkpoints']} iterations several nodes have "
        f"saved, all the same weights.\n\n{table(rows, *COLUMNS)}"
    )


BENCHMARK = Benchmark(
    spec=__spec__,
    question=__doc__,
    flags=(
        Flag("--minutes", 30.0, "how long nodes are killed", least=0),
        Flag("--nodes", 3, "with how many the run begins", least=2),
        Flag("--ranks", 1, "of a node", least=1),
        Flag("--pause", 30.0, "most seconds between a join and the next kill", least=0),
        Flag("--seed", 0, "of the moments and the nodes"),
    ),
    measure=measure,
    show=show,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
