"""A training job of four ranks on two emulated nodes, each with torchrun's agent and a supervisor.

The supervisor stands for what a cluster has (Slurm's --requeue, systemd, Kubernetes): it starts an
agent again that has ended. The agents restart the ranks. Run as a program, the module is a rank:
pretrain_gpt.py's program, after it has said which process it is.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.network import emulation
from benchmarks.endurance.resources import GrowingFile
from benchmarks.shared.processes import start
from benchmarks.shared.result import write_text
from megatron_zpp.commands.pretrain import main
from zeropp.errors import InputError
from zeropp.ranks.exit import exit_process

NODES, RANKS_PER_NODE = 2, 2
PORT = 29500  # free in every namespace
# A model that trains fast, as the subject is everything else; no schedule depends on the length.
MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100 --num-workers 1 --log-interval 1 "
    "--eval-iters 0 --lr 1e-3 --lr-decay-style constant --hidden-dropout 0.1 "
    "--micro-batch-size 1 --global-batch-size 8 --zero-stage 3 --train-iters 10000000 "
    "--keep-checkpoints 3"
)
AGENT = (
    "--max-restarts 1000000 --rdzv-backend c10d --rdzv-id endurance --rdzv-conf "
    "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=600"
)
DISK_BYTES = 16 * 2**20  # of the file system for checkpoints, some ten of which fit
SUPERVISOR_SECONDS = 0.5  # before an agent is started again
LOADED = re.compile(r"loaded checkpoint of iteration (\d+)")


def _loaded_or_failed(line: str) -> int | str | None:
    """The iteration of the checkpoint that a line says was loaded, or a line of a failed save."""
    if match := LOADED.search(line):
        return int(match[1])
    return line if "cannot save" in line else None


def _loss_of_iteration(line: str) -> tuple[int, float]:
    """The iteration and the loss of a line of metrics.jsonl."""
    record = json.loads(line)
    return record["iteration"], record["lm_loss"]


@dataclass(kw_only=True)
class Node:
    """A machine of the job: its agent's process, and the log of all its agents."""

    number: int
    log: Path
    events: GrowingFile
    agent: subprocess.Popen | None = None
    agents_started: int = 0
    num_seen: int = 0  # items of `events` that the job has counted
    ended: float = 0.0  # time.monotonic() when the last agent was seen to have ended


class Job:
    """The running job; `supervise` must be called often. Folders are below `folder`."""

    def __init__(self, folder: Path, limit_seconds: float, flags: Sequence[str]) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        logs = [folder / f"node{number}.log" for number in range(NODES)]
        self.nodes = [
            Node(number=number, log=log, events=GrowingFile(log, _loaded_or_failed))
            for number, log in enumerate(logs)
        ]
        self._events: list[int | str] = []
        self._losses = GrowingFile(folder / "curves" / "metrics.jsonl", _loss_of_iteration)
        self._flags = [
            *MODEL.split(),
            *("--save", str(self.checkpoints), "--load", str(self.checkpoints)),
            *("--tensorboard-dir", str(folder / "curves")),
            *("--distributed-timeout-minutes", f"{limit_seconds / 60:g}"),
            *flags,
        ]

    def supervise(self) -> None:
        """Start the agents that have ended again."""
        for node in self.nodes:
            if node.agent is not None and node.agent.poll() is not None:
                node.agent, node.ended = None, time.monotonic()
            if node.agent is None and time.monotonic() - node.ended > SUPERVISOR_SECONDS:
                self._start_agent(node)

    def losses(self) -> dict[int, float]:
        """The loss of each iteration so far, in nats per token."""
        return dict(self._losses.items())

    def resumed(self) -> list[int]:
        """The iterations of the checkpoints that attempts have loaded so far."""
        return [event for event in self._new_events() if isinstance(event, int)]

    def failed_saves(self) -> int:
        """How many saves have failed so far."""
        return sum(isinstance(event, str) for event in self._new_events())

    def text(self) -> str:
        """What all ranks and agents have printed, node by node."""
        logs = [node.log for node in self.nodes if node.log.exists()]
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def processes(self) -> dict[str, int]:
        """The agents, and rank 0 if it has started, by name."""
        agents = [node for node in self.nodes if node.agent is not None]
        named = {f"agent of node {node.number}": node.agent.pid for node in agents}
        return named | ({"rank 0": self.rank_pid(0)} if pid_file(self.folder, 0).exists() else {})

    def rank_pid(self, rank: int) -> int:
        """The process of a rank."""
        return int(pid_file(self.folder, rank).read_text())

    def kill_node(self, number: int) -> None:
        """SIGKILL everything that runs on a node, as a power cut would."""
        for process in emulation.processes(number):
            with suppress(ProcessLookupError):  # it has ended already
                os.kill(process, signal.SIGKILL)

    def newest_checkpoint(self) -> Path:
        """The checkpoint that the next attempt would load."""
        iteration = int((self.checkpoints / "latest_checkpointed_iteration.txt").read_text())
        return self.checkpoints / f"iter_{iteration:07d}"

    def stop(self) -> None:
        """Kill what runs on both nodes."""
        for node in self.nodes:
            self.kill_node(node.number)
            if node.agent is not None:
                node.agent.wait()

    def _new_events(self) -> list[int | str]:
        for node in self.nodes:  # rank 0, which says so, may move to another node
            new = node.events.items()[node.num_seen :]
            node.num_seen += len(new)
            self._events += new
        return self._events

    def _start_agent(self, node: Node) -> None:
        variables = {"CUDA_VISIBLE_DEVICES": "", **emulation.VARIABLES}
        command = [
            *(*emulation.prefix(node.number), sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(NODES), "--nproc-per-node", str(RANKS_PER_NODE)),
            *("--local-addr", emulation.address(node.number)),
            *("--rdzv-endpoint", f"{emulation.address(0)}:{PORT}"),
            *f"{AGENT},is_host={node.number == 0}".split(),
            *("-m", __name__, str(self.folder), *self._flags),
        ]
        node.agent = start(command, node.log, variables=variables, appends=True)
        node.agents_started += 1


@contextmanager
def started_job(folder: Path, limit_seconds: float, flags: Sequence[str]) -> Iterator[Job]:
    """Start the job on two new nodes, with a small file system of its own for checkpoints.

    `limit_seconds` is its time limit for collectives, `flags` are added to those of the job.
    Raises InputError where the system does not allow that.
    """
    job = Job(folder, limit_seconds, flags)
    job.checkpoints.mkdir(parents=True)
    disk = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(job.checkpoints)]
    with emulation.emulated_cluster(NODES):
        done = subprocess.run(["mount", *disk], capture_output=True, text=True)
        if done.returncode != 0:
            raise InputError(f"a small file system cannot be made here: {done.stderr.strip()}")
        try:
            job.supervise()
            yield job
        finally:
            job.stop()
            subprocess.run(["umount", "--lazy", str(job.checkpoints)], check=True)


def pid_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its process id."""
    return folder / f"rank{rank}.pid"


if __name__ == "__main__":
    write_text(pid_file(Path(sys.argv[1]), int(os.environ["RANK"])), str(os.getpid()))
    exit_process(main(sys.argv[2:]))
