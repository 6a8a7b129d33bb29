"""Ranks on an emulated cluster or on one host, gone when the benchmark ends however it ends."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from benchmarks.cluster.network import emulation
from benchmarks.cluster.rank_processes import RankProcesses, started_ranks

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PORT = 29500  # free in every namespace


def exit_on_signals() -> None:
    """Turn signals that end this process into SystemExit, so that clean-up runs."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _exit)


@contextlib.contextmanager
def started_cluster(
    nodes: int, ranks_per_node: int, round_trip: float | None
) -> Iterator[RankProcesses]:
    """Start the ranks on nodes with links without a limit, `round_trip` seconds apart.

    They are started without a network if it is None.
    """
    with contextlib.ExitStack() as stack:
        prefixes = [[]] * nodes
        if round_trip is None:
            variables = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(emulation.free_port()),
                "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            }
        else:
            stack.enter_context(emulation.emulated_cluster(nodes, round_trip))
            prefixes = [emulation.prefix(node) for node in range(nodes)]
            variables = {
                "MASTER_ADDR": emulation.address(0),
                "MASTER_PORT": str(PORT),
                **emulation.VARIABLES,
            }
        yield stack.enter_context(started_ranks(prefixes, ranks_per_node, variables))


def _exit(number: int, frame: FrameType | None) -> None:
    """Exit as after the signal; ignore further signals, so that clean-up is not interrupted."""
    for ignored in ENDING_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    print(f"\nstopped by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)
