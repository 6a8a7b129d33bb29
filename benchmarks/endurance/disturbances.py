"""What goes wrong on a cluster, done to the endurance job at a moment of its life.

Each function breaks something at once and returns after it has put right what is outside of the job
(a full disk, a cut cable). What the job needs to go on is left to it.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.cluster.network import emulation
from benchmarks.endurance.job import NODES, RANKS_PER_NODE, Job
from benchmarks.shared.interleaved import Disagreement

FULL_SECONDS = 120  # within which a save must have met a full disk
BLOCK = 4096  # bytes of a file system's block
Act = Callable[[Job, random.Random, float], str]  # returns what was broken


class Disturbance(NamedTuple):
    """A kind of failure."""

    meaning: str
    act: Act


def signalled(number: signal.Signals) -> Act:
    """A disturbance that sends a signal to a rank."""

    def send(job: Job, draw: random.Random, limit: float) -> str:
        rank = draw.randrange(NODES * RANKS_PER_NODE)
        os.kill(job.rank_pid(rank), number)
        return f"rank {rank}"

    return send


kill = signalled(signal.SIGKILL)


def node(job: Job, draw: random.Random, limit: float) -> str:
    """SIGKILL the agent and the ranks of a node, as if it lost power."""
    number = draw.randrange(NODES)
    job.kill_node(number)
    return f"node {number}"


def link(job: Job, draw: random.Random, limit: float) -> str:
    """Cut the link between the nodes for longer than the limit."""
    emulation.set_link(1, "down")
    end = time.monotonic() + 1.2 * limit
    while time.monotonic() < end:
        job.supervise()
        time.sleep(0.1)
    emulation.set_link(1, "up")
    return f"{1.2 * limit:.0f} s"


def disk(job: Job, draw: random.Random, limit: float) -> str:
    """Fill the disk until a save has failed."""
    failures = job.failed_saves()
    filler = job.checkpoints / "filler"
    deadline = time.monotonic() + FULL_SECONDS
    while job.failed_saves() == failures:
        if time.monotonic() > deadline:
            raise Disagreement(f"no save has met the full disk in {FULL_SECONDS} s")
        job.supervise()
        if free := shutil.disk_usage(job.checkpoints).free // BLOCK * BLOCK:
            with filler.open("ab", buffering=0) as file:
                file.write(bytes(free))
        time.sleep(0.02)
    filler.unlink()
    return "full until a save failed"


def truncate(job: Job, draw: random.Random, limit: float) -> str:
    """Cut a file of the newest checkpoint, then SIGKILL a rank."""
    checkpoint = job.newest_checkpoint()
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    path = draw.choice(files)
    os.truncate(path, draw.randrange(path.stat().st_size))
    return f"{checkpoint.name}/{path.name}, {kill(job, draw, limit)}"


KINDS = {
    "kill": Disturbance("SIGKILL to a rank", kill),
    "stop": Disturbance("SIGSTOP to a rank, for good: it hangs", signalled(signal.SIGSTOP)),
    "terminate": Disturbance("SIGTERM to a rank", signalled(signal.SIGTERM)),
    "node": Disturbance("SIGKILL to a node's agent and ranks, as if it lost power", node),
    "link": Disturbance("the link between the nodes is cut for longer than the limit", link),
    "disk": Disturbance("the disk is full until a save has failed", disk),
    "truncate": Disturbance("a file of the newest checkpoint is cut, then SIGKILL", truncate),
}
