"""A run whose nodes come and go on this machine: a store, and one launch for each node."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.shared.processes import LAUNCH, ROOT, kill_all, start
from zeropp.checkpoint.state_tensors import MODEL as WEIGHTS

POLL_SECONDS = 0.05
# A model that trains fast, as the subject is everything else.
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 50 --num-workers 0 --log-interval 1 "
    "--eval-iters 0 --lr 1e-3 --micro-batch-size 1 --train-iters 100000000 "
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class LaunchedNode:
    """The launcher of a node on one of the hosts, and the log of all its ranks."""

    launcher: subprocess.Popen
    log: Path
    host: int = 0

    @property
    def steps(self) -> list[int]:
        """The steps in the log."""
        return [int(number) for number in re.findall(r"iteration +(\d+)/", self.log.read_text())]

    @property
    def number(self) -> int | None:
        """What names the node's checkpoints, as far as one has been saved or it has joined."""
        text = self.log.read_text()
        if joined := re.search(r"joined .* as node (\d+)", text):
            return int(joined[1])
        saved = re.search(r"saved checkpoint \S*?(?:/node_(\d+))?/iter_", text)
        return int(saved[1] or 0) if saved else None

    def kill(self) -> None:
        """Kill all its processes at once."""
        kill_all(self.launcher)


@dataclass(kw_only=True)
class LaunchedNodes:
    """The nodes of a run in `folder`, of `ranks` each, which begins with `planned` of them.

    every: steps between outer steps. flags: added to those of the model. hosts: the prefixes of
    commands on machines of an emulated cluster: on the last, at `store_address`, is the store, on
    each of the others a node. Without them, all are on this machine.
    """

    folder: Path
    planned: int
    ranks: int
    every: int
    flags: str = ""
    hosts: Sequence[Sequence[str]] = ()
    store_address: str = "127.0.0.1"
    nodes: list[LaunchedNode] = field(default_factory=list)

    def __enter__(self) -> "LaunchedNodes":
        self._store = self._start("store.txt", [*LAUNCH, "--keep_store", "0"], -1)
        pattern = re.compile(r"nodes meet at \S+:(\d+)")
        port = wait_for(lambda: pattern.search(self._store.log.read_text()), 60)[1]
        zeropp = {
            "sync_every": self.every,
            "sync_store": f"{self.store_address}:{port}",
            "sync_nodes": self.planned,
        }
        settings = {"zero_optimization": {"stage": 3}, "zeropp": zeropp}
        (self.folder / "zeropp.json").write_text(json.dumps(settings))
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left of them."""
        for each in [*self.nodes, self._store]:
            if each.launcher.poll() is None:
                each.kill()

    @property
    def checkpoints(self) -> Path:
        """The folder of `--save`."""
        return self.folder / "save"

    def add(self) -> LaunchedNode:
        """Start a node, on a host without one."""
        flags = (
            f"{MODEL} --global-batch-size {self.planned * self.ranks} "
            f"--deepspeed_config {self.folder}/zeropp.json "
            f"--save {self.checkpoints} --load {self.checkpoints} {self.flags}"
        )
        command = [*LAUNCH, "--num_ranks", str(self.ranks), str(ROOT / "pretrain_gpt.py")]
        used = {node.host for node in self.nodes if node.launcher.poll() is None}
        host = next(number for number in range(len(self.nodes) + 1) if number not in used)
        node = self._start(f"log-{len(self.nodes)}.txt", [*command, *flags.split()], host)
        self.nodes.append(node)
        return node

    def differences(self, name: str) -> tuple[int, bool]:
        """Return how many nodes have saved the checkpoint of a name, and whether weights differ."""
        folders = [self.checkpoints, *self.checkpoints.glob("node_*")]
        first, *others = (saved_weights(each / name) for each in folders if (each / name).is_dir())
        alike = bool(first) and all(
            first.keys() == other.keys()
            and all(torch.equal(first[key], other[key]) for key in first)
            for other in others
        )
        return 1 + len(others), not alike

    def _start(self, log: str, command: list[str], host: int) -> LaunchedNode:
        path, prefix = self.folder / log, self.hosts[host] if self.hosts else ()
        return LaunchedNode(start([*prefix, *command], path, self.folder), path, host)


def wait_for(condition: Callable[[], Result], seconds: float) -> Result:
    """Return what a condition returns once that is true; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seconds:.0f} s have passed")
        time.sleep(POLL_SECONDS)
    return value


def saved_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 weights of a checkpoint by name, whole, read without a model."""
    reader = dcp.FileSystemReader(path)
    described = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(each.size)
        for name, each in described.items()
        if name.startswith(WEIGHTS) and each.properties.dtype == torch.float32
    }
    dcp.load(weights, storage_reader=reader, no_dist=True)
    return weights
