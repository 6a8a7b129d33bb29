"""A cluster on one machine: every node a network namespace, joined by links of a given rate.

    with emulated_cluster(num_nodes=2, rate="200mbit") as cluster:
        subprocess.Popen([*cluster.inside(0), "python", ...])

Two nodes are the ends of one veth pair; more hang on a bridge in a namespace of its own. Each end
of a link is shaped by `tbf`, so a node sends and receives at most `rate`, both at once. Rates hold
for whole packets of at most MTU bytes; TCP's share of them is 66 bytes of each.

Namespaces are named after this process, `zeropp-PID-...`: two runs never meet, and what a run
that was killed left behind is removed by the next.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zeropp.errors import InputError

INTERFACE, LOOPBACK = "eth0", "lo"  # of a node: to the others, and in itself
MTU = 9000  # bytes: Ethernet's jumbo frame
UNLIMITED = "none"
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
BURST_SECONDS, BURST_BYTES = 150e-6, 2 * MTU + 384  # what an idle link may send at once
QUEUE_BYTES = 2**23  # at a link: more than TCP ever queues, so nothing is dropped
END_SECONDS = 5  # for killed processes to be gone
INSTEAD = "--one-host runs the ranks without a network, and shows the ledger's bytes"
NAME = re.compile(r"zeropp-(\d+)-\w+")


@dataclass(frozen=True)
class Counters:
    """Bytes that an interface has sent and received since it was made."""

    sent: int
    received: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(self.sent - before.sent, self.received - before.received)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Namespaces that exist: one per node, joined."""

    num_nodes: int
    rate: str

    def inside(self, node: int) -> list[str]:
        """The beginning of a command that runs in a node."""
        return ["ip", "netns", "exec", _name(f"node{node}")]

    def address(self, node: int) -> str:
        """A node's address, the same in every run: no namespace sees another run's."""
        return f"10.0.{node // 250}.{node % 250 + 1}"

    def dropped(self) -> int:
        """Packets that the shaped links have dropped."""
        names = [name for name in _namespaces() if NAME.fullmatch(name)[1] == str(os.getpid())]
        listed = [json.loads(_run("tc", "-n", name, "-s", "-j", "qdisc")) for name in names]
        return sum(one.get("drops", 0) for qdiscs in listed for one in qdiscs)


def bits_per_second(rate: str) -> float | None:
    """A rate as in "200mbit", "1.5gbit" or "none" (None); raises InputError for anything else."""
    if rate == UNLIMITED:
        return None
    read = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", rate, re.ASCII)
    if read is None or not float(read[1]):
        raise InputError(
            f"the rate {rate!r}: expected a number and a unit ({', '.join(UNITS)}), "
            f"as in 200mbit, or {UNLIMITED}"
        )
    return float(read[1]) * UNITS[read[2]]


def require_means() -> None:
    """Raise InputError unless namespaces and shaped links can be made here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InputError(
            f"no command {' and no command '.join(missing)} here: a cluster is emulated with both "
            f"(Linux; Debian's package is iproute2). {INSTEAD}"
        )
    if os.geteuid() != 0:
        raise InputError(f"network namespaces are made by root only. {INSTEAD}")


@contextmanager
def emulated_cluster(num_nodes: int, rate: str) -> Iterator[Cluster]:
    """Make the nodes and their links; remove them, and what runs in them, at the end.

    Raises InputError where the system refuses.
    """
    require_means()
    try:
        remove_stale()
        _make(num_nodes, bits_per_second(rate))
        yield Cluster(num_nodes=num_nodes, rate=rate)
    except CommandFailed as failure:
        raise InputError(f"the cluster could not be made: {failure}. {INSTEAD}") from failure
    finally:
        remove(os.getpid())


def remove_stale() -> None:
    """Remove what runs that no longer exist have left."""
    owners = {int(NAME.fullmatch(name)[1]) for name in _namespaces()}
    for owner in owners:
        if not Path(f"/proc/{owner}").exists():
            remove(owner)


def remove(owner: int) -> None:
    """Remove the namespaces that process `owner` made, with all that runs in them."""
    names = [name for name in _namespaces() if NAME.fullmatch(name)[1] == str(owner)]
    for name in names:
        _kill_all(name)
    for name in names:
        _run("ip", "netns", "delete", name)


def counters(process: int) -> dict[str, Counters]:
    """The interfaces in the namespace of a process, by name."""
    found = {}
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        received, sent = (int(numbers.split()[column]) for column in (0, 8))
        found[name.strip()] = Counters(sent, received)
    return found


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class CommandFailed(RuntimeError):
    """`ip` or `tc` refused."""


def _make(num_nodes: int, rate: float | None) -> None:
    names = [_name(f"node{node}") for node in range(num_nodes)]
    for name in names:
        _make_namespace(name)
    if num_nodes == 2:
        _join(names[0], INTERFACE, names[1], INTERFACE)
        ends = [(name, INTERFACE) for name in names]
    else:
        ends = _join_by_bridge(names)
    cluster = Cluster(num_nodes=num_nodes, rate="")
    for node, name in enumerate(names):
        _run("ip", "-n", name, "address", "add", f"{cluster.address(node)}/8", "dev", INTERFACE)
    for name, interface in ends:
        _run("ip", "-n", name, "link", "set", interface, "up")
        if rate is not None:
            burst = max(BURST_BYTES, int(rate / 8 * BURST_SECONDS))
            _run(
                *("tc", "-n", name, "qdisc", "add", "dev", interface, "root", "tbf"),
                *("rate", f"{rate:.0f}bit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b"),
            )


def _make_namespace(name: str) -> None:
    """Without IPv6, whose neighbour discovery would count, and with TCP's plainest control.

    A loss-free link of no delay gives congestion control nothing to find; Reno, which every
    namespace may use, leaves it alone, where BBR paces by its own guesses.
    """
    _run("ip", "netns", "add", name)
    settings = ("net.ipv6.conf.default.disable_ipv6=1", "net.ipv4.tcp_congestion_control=reno")
    for setting in settings:
        key, value = setting.split("=")
        path = f"/proc/sys/{key.replace('.', '/')}"
        _run("ip", "netns", "exec", name, "sh", "-c", f"[ ! -e {path} ] || echo {value} > {path}")
    _run("ip", "-n", name, "link", "set", LOOPBACK, "up")


def _join(one: str, its_end: str, other: str, other_end: str) -> None:
    mtu = ("mtu", str(MTU))
    _run(
        *("ip", "link", "add", its_end, "netns", one, *mtu, "type", "veth"),
        *("peer", "name", other_end, "netns", other, *mtu),
    )


def _join_by_bridge(names: Sequence[str]) -> list[tuple[str, str]]:
    """Join the nodes by a bridge; returns both ends of every link as (namespace, interface)."""
    hub = _name("hub")
    _make_namespace(hub)
    _run("ip", "-n", hub, "link", "add", "bridge0", "mtu", str(MTU), "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge0", "up")
    ends = []
    for node, name in enumerate(names):
        _join(name, INTERFACE, hub, f"port{node}")
        _run("ip", "-n", hub, "link", "set", f"port{node}", "master", "bridge0")
        ends += [(name, INTERFACE), (hub, f"port{node}")]
    return ends


def _name(part: str) -> str:
    return f"zeropp-{os.getpid()}-{part}"


def _namespaces() -> list[str]:
    """All namespaces named as ours."""
    listed = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]
    return [name for name in listed if NAME.fullmatch(name)]


def _kill_all(name: str) -> None:
    """Kill what runs in a namespace and wait until it is gone."""
    deadline = time.monotonic() + END_SECONDS
    while running := _run("ip", "netns", "pids", name).split():
        for process in running:
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself
        if time.monotonic() > deadline:
            raise CommandFailed(f"processes {' '.join(running)} in {name} do not end")
        time.sleep(0.02)


def _run(*command: str) -> str:
    """Run a command and return what it prints; raises CommandFailed with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
