"""Kills and joins of replicas of elastic local SGD, at random: does the run go on without a hand?

Each node is a launch of its own, and a supervisor starts a new one for each that ended. With --rate
each is in a network namespace of this machine, as is the store, with a link of that rate to the
others (needs root, and the commands ip and tc). At random moments, about one in a minute, all
processes of a node are killed at once. Required are that the others pass the step that they had
reached within 30 s, that no node counts a step twice, and that nodes that have saved the same
iteration have the same weights, to the bit.
"""

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.network import emulation
from benchmarks.endurance.launched_nodes import LaunchedNode, LaunchedNodes, wait_for
from benchmarks.shared.benchmark import Benchmark, Flag, Options
from benchmarks.shared.interleaved import Disagreement
from benchmarks.shared.processes import exit_on_signals
from benchmarks.shared.table import Column, table

GOES_ON_SECONDS, START_SECONDS = 30.0, 300.0
EVERY, SAVES, KEPT = 10, 50, 100  # steps between exchanges and checkpoints, and how many are kept
COLUMNS = (
    Column("after s", "at", ".0f"),
    Column("killed node", "killed"),
    Column("others went on after s", "goes_on", ".1f"),
    Column("successor joined after s", "joined", ".1f"),
)


class Cluster:
    """The nodes of a run that have not been killed."""

    def __init__(self, run: LaunchedNodes) -> None:
        self.run = run
        self.nodes = [run.add() for _ in range(run.planned)]
        for node in self.nodes:
            self.wait(lambda node=node: len(node.steps) > EVERY)

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait for something; raises Disagreement if it takes long or a node ends by itself."""

        def holds() -> object:
            for node in self.nodes:
                if node.launcher.poll() is not None:
                    raise Disagreement(f"a node has ended by itself:\n{end_of(node)}")
            return condition()

        try:
            wait_for(holds, START_SECONDS)
        except TimeoutError as error:
            raise Disagreement(f"the run does not go on: {error}") from error

    def replace_one(self, draw: random.Random) -> dict:
        """Kill a node, wait until the others have passed their step, and let another one join."""
        node = self.nodes.pop(draw.randrange(len(self.nodes)))
        others, number = [*self.nodes], node.number
        node.kill()
        killed, reached = time.monotonic(), [max(each.steps) for each in others]
        successor = self.run.add()
        self.nodes.append(successor)
        self.wait(
            lambda: all(
                max(each.steps) > step + EVERY for each, step in zip(others, reached, strict=True)
            )
        )
        goes_on = time.monotonic() - killed
        if goes_on > GOES_ON_SECONDS:
            limit = f"{GOES_ON_SECONDS:.0f}"
            raise Disagreement(f"the others went on after {goes_on:.1f} s, not {limit}")
        self.wait(lambda: len(successor.steps) > EVERY)
        name = "one that had not saved" if number is None else number
        return {"killed": name, "goes_on": goes_on, "joined": time.monotonic() - killed}


def measure(options: Options, result: dict) -> None:
    """Kill nodes and start others; raise Disagreement where the run does not go on by itself."""
    exit_on_signals()
    draw, rows = random.Random(options.seed), []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zeropp-nodes-"))
        run = LaunchedNodes(
            folder=Path(folder),
            planned=options.nodes,
            ranks=options.ranks,
            every=EVERY,
            flags=f"--save-interval {SAVES} --keep-checkpoints {KEPT}",
            **emulated_hosts(options, stack),
        )
        with run:
            cluster = Cluster(run)
            began = time.monotonic()
            while time.monotonic() - began < 60 * options.minutes:
                time.sleep(draw.uniform(0, options.pause))
                rows.append({"at": time.monotonic() - began, **cluster.replace_one(draw)})
                print(table(rows[-1:], *COLUMNS), file=sys.stderr, flush=True)
        result["kills"] = rows
        result["seconds"] = time.monotonic() - began
        result["steps"] = max(max(node.steps) for node in cluster.nodes)
        result["equal_checkpoints"] = compare(run)
        for node in run.nodes:
            if node.steps != sorted(set(node.steps)):
                raise Disagreement(f"a node has taken a step twice:\n{end_of(node)}")


def emulated_hosts(options: Options, stack: contextlib.ExitStack) -> dict:
    """Create a namespace for each node and for the store; nothing without a rate."""
    if options.rate is None:
        return {}
    store = options.nodes
    stack.enter_context(emulation.emulated_cluster(options.nodes + 1))
    emulation.set_rate(options.nodes + 1, options.rate)
    variables = [f"{name}={value}" for name, value in emulation.VARIABLES.items()]
    hosts = [[*emulation.prefix(host), "env", *variables] for host in range(options.nodes + 1)]
    return {"hosts": hosts, "store_address": emulation.address(store)}


def check(options: Options) -> None:
    """Raise InputError if the cluster cannot be emulated."""
    if options.rate is not None:
        emulation.checked_rates([options.rate])


def compare(run: LaunchedNodes) -> int:
    """Return how many checkpoints are of several nodes; raise Disagreement if they differ."""
    count = 0
    for name in {path.name for path in run.checkpoints.rglob("iter_*")}:
        num_nodes, differ = run.differences(name)
        if differ:
            raise Disagreement(f"nodes have saved other weights in {name}")
        count += num_nodes > 1
    return count


def end_of(node: LaunchedNode) -> str:
    """Return the last lines of a log."""
    return node.log.read_text()[-4000:]


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


OPTIONS = (
    Flag("--minutes", 30.0, "how long nodes are killed", least=0),
    Flag("--nodes", 3, "with how many the run begins", least=2),
    Flag("--ranks", 1, "of a node", least=1),
    Flag("--pause", 30.0, "most seconds between a join and the next kill", least=0),
    Flag("--rate", help="of each node's link in an emulated cluster, as in 100mbit"),
    Flag("--seed", 0, "of the moments and the nodes"),
)
BENCHMARK = Benchmark(__spec__, __doc__, measure, show, OPTIONS, check=check)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
