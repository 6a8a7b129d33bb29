"""Nodes that step alone, each a launch of its own: SIGKILL to one, and another in its place."""

import json
import re
import signal
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.endurance.launched_nodes import LaunchedNode, LaunchedNodes, wait_for
from benchmarks.shared.processes import signal_all

INTERVAL = 4  # of exchanges; checkpoints are saved after every second one


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_without_the_node_that_is_killed_and_with_the_one_that_joins(
    tmp_path: Path,
) -> None:
    """The first node is killed, with rank 0 and the checkpoints' writer; nothing is rolled back."""
    flags = f"--save-interval {2 * INTERVAL} --tensorboard-dir {tmp_path}/curves "
    flags += f"--eval-iters 1 --eval-interval {INTERVAL}"
    run = LaunchedNodes(folder=tmp_path, planned=2, ranks=2, every=INTERVAL, flags=flags)
    with run:
        nodes = [run.add(), run.add()]
        for node in nodes:
            wait_for_line(r"saved checkpoint \S+", node)
        first, second = sorted(nodes, key=lambda node: node.number)  # who comes first is node 0
        first.kill()
        third = run.add()
        wait_for_line(r"node 0 ended, 1 go on: node 1", second)
        wait_for_line(r"node 0 joined, 2 go on: nodes 1, 0", second)
        joined = int(wait_for_line(r"iteration +(\d+)/[^\n]*global batch size: +4 ", third))
        saved = f"iter_0*{last_save(joined)}\n"
        wait_for_line(rf"saved checkpoint \S+node_1/{saved}", second)
        wait_for_line(rf"saved checkpoint \S+save/{saved}", third)
    assert run.differences(f"iter_{last_save(joined):07}") == (2, False)
    require_same_evaluations(first, second)
    require_same_evaluations(third, second)
    assert second.steps == [*range(1, len(second.steps) + 1)]
    sizes = re.findall(r"global batch size: +(\d+) ", second.log.read_text())
    assert [size for size, _ in groupby(sizes)] == ["4", "2", "4"]
    lines = (tmp_path / "curves" / "metrics.jsonl").read_text().splitlines()
    curve = [each["iteration"] for each in map(json.loads, lines) if "lm_loss" in each]
    missing = set(range(1, joined)).difference(curve)  # since the last exchange of the first one
    assert curve == sorted(set(curve)) and len(missing) <= INTERVAL and curve[-1] > joined


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_node_that_is_stopped_for_long_ends_when_it_goes_on(tmp_path: Path) -> None:
    """The others take it for dead; it saves nothing after the exchange that they did without it."""
    flags = f"--save-interval {INTERVAL // 2}"
    run = LaunchedNodes(folder=tmp_path, planned=2, ranks=1, every=INTERVAL, flags=flags)
    with run:
        nodes = [run.add(), run.add()]
        for node in nodes:
            wait_for_line(r"saved checkpoint \S+", node)
        first, second = sorted(nodes, key=lambda node: node.number)
        signal_all(first.launcher, signal.SIGSTOP)
        wait_for_line(r"node 0 ended, 1 go on: node 1", second)
        signal_all(first.launcher, signal.SIGCONT)
        wait_for_line(r"node 0 had not been heard of for so long that .* as node 1: start", first)
        assert first.launcher.wait(60)
        reached = second.steps[-1]
        wait_for(lambda: second.steps[-1] > reached, 60)
    sizes = re.findall(r"iteration +(\d+)/.*global batch size: +1 ", second.log.read_text())
    (newest,) = re.findall(r"saved checkpoint \S+save/iter_0*(\d+)", first.log.read_text())[-1:]
    assert int(newest) < int(sizes[0])


def wait_for_line(pattern: str, node: LaunchedNode) -> str:
    """Wait for a pattern in a log; return its first group, or all of it."""
    try:
        match = wait_for(lambda: re.search(pattern, node.log.read_text()), 180)
    except TimeoutError as error:
        raise AssertionError(f"{pattern} never came:\n{node.log.read_text()}") from error
    return match[match.lastindex or 0]


def require_same_evaluations(node: LaunchedNode, other: LaunchedNode) -> None:
    """Require that nodes have printed the same losses of evaluations that both have."""
    own, others = (
        dict(re.findall(r"loss at iteration (\d+) \| lm loss value: (\S+)", each.log.read_text()))
        for each in (node, other)
    )
    both = own.keys() & others.keys()
    assert len(both) > 1 and all(own[each] == others[each] for each in both)


def last_save(joined: int) -> int:
    """Return the second iteration from `joined` on at which checkpoints are saved."""
    every = 2 * INTERVAL
    return (joined // every + 2) * every
