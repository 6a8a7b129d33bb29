"""A cluster on one machine: every node a network namespace, joined by links of a given rate.

    with emulated_cluster(num_nodes=2):
        set_rate(2, "200mbit")
        subprocess.Popen([*prefix(0), "python", ...])

Two nodes are the ends of one veth pair; more are joined by a bridge in its own namespace. Each end
of a link is shaped by `tbf`, so a node sends and receives at most the rate at the same time. Rates
include headers: packets have at most MTU bytes, of which TCP and below take 66. The link of two
nodes may have a delay.

Namespaces are named after this process, `zeropp-PID-...`, so runs do not interfere. What a killed
run leaves behind is removed by the next run.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.network.delay_line import DelayLine
from zeropp.errors import InputError

INTERFACE, LOOPBACK = "eth0", "lo"  # of a node: to other nodes, and within the node
VARIABLES = {  # of ranks in nodes, where no name server answers: torch asks for every connection
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "RES_OPTIONS": "timeout:1 attempts:1",
}
MTU = 9000  # bytes: Ethernet's jumbo frame
UNLIMITED = "none"
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
BURST_SECONDS, BURST_BYTES = 150e-6, 2 * MTU + 384  # that an unused link may send at once
QUEUE_BYTES = 2**23  # at a link: more than TCP ever queues, so nothing is dropped
END_SECONDS = 5  # for killed processes to end
ONE_HOST_HINT = "--one-host runs the ranks without a network, and shows the ledger's bytes"
NAME = re.compile(r"zeropp-(\d+)-\w+")


@dataclass(frozen=True)
class Counters:
    """Bytes that an interface has sent and received since it was created."""

    sent: int
    received: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(self.sent - before.sent, self.received - before.received)


def prefix(node: int) -> list[str]:
    """The prefix of a command that is to run in a node."""
    return ["ip", "netns", "exec", _name(f"node{node}")]


def address(node: int) -> str:
    """A node's address; the same in every run, as runs do not see each other's networks."""
    return f"10.0.{node // 250}.{node % 250 + 1}"


def processes(node: int) -> list[int]:
    """The processes that run in a node."""
    return [int(process) for process in _run("ip", "netns", "pids", _name(f"node{node}")).split()]


def set_link(node: int, state: str) -> None:
    """Set a node's link to the other nodes "up" or "down"."""
    _run("ip", "-n", _name(f"node{node}"), "link", "set", INTERFACE, state)


def set_rate(num_nodes: int, rate: str) -> None:
    """Limit every link to a rate in each direction, from now on."""
    limit = bits_per_second(rate)
    for name, interface in _ends(num_nodes):
        qdisc = ("tc", "-n", name, "qdisc")
        if "tbf" in _run(*qdisc, "show", "dev", interface):
            _run(*qdisc, "delete", "dev", interface, "root")
        if limit is not None:
            burst = max(BURST_BYTES, int(limit / 8 * BURST_SECONDS))
            _run(
                *(*qdisc, "add", "dev", interface, "root", "tbf"),
                *("rate", f"{limit:.0f}bit", "burst", f"{burst}b", "limit", f"{QUEUE_BYTES}b"),
            )


def dropped() -> int:
    """Packets that the shaped links have dropped."""
    names = [name for name in _namespaces() if NAME.fullmatch(name)[1] == str(os.getpid())]
    lists = [json.loads(_run("tc", "-n", name, "-s", "-j", "qdisc")) for name in names]
    return sum(qdisc.get("drops", 0) for qdiscs in lists for qdisc in qdiscs)


def bits_per_second(rate: str) -> float | None:
    """A rate as in "200mbit", "1.5gbit" or "none" (None); raises InputError for anything else."""
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})", rate, re.ASCII)
    if match is None or not float(match[1]):
        raise InputError(
            f"the rate {rate!r}: expected a number and a unit ({', '.join(UNITS)}), "
            f"as in 200mbit, or {UNLIMITED}"
        )
    return float(match[1]) * UNITS[match[2]]


def checked_rates(rates: Sequence[str] | None, *default: str) -> list[str]:
    """Each rate once, or the default ones; raises InputError for what is no rate, or no root."""
    rates = list(dict.fromkeys(rates or default))
    for rate in rates:
        bits_per_second(rate)
    require_namespaces()
    return rates


def require_namespaces() -> None:
    """Raise InputError unless namespaces and shaped links can be created here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InputError(
            f"no command {' and no command '.join(missing)} here: emulating a cluster needs ip and "
            f"tc (Linux; Debian's package is iproute2). {ONE_HOST_HINT}"
        )
    if os.geteuid() != 0:
        raise InputError(f"only root can create network namespaces. {ONE_HOST_HINT}")


@contextlib.contextmanager
def emulated_cluster(num_nodes: int, round_trip: float = 0) -> Iterator[None]:
    """Create nodes and links without a limit; at the end remove them and kill what runs in them.

    round_trip: seconds; only of two nodes. Raises InputError if the system refuses.
    """
    require_namespaces()
    try:
        remove_stale()
        with contextlib.ExitStack() as stack:
            _create(num_nodes, round_trip, stack)
            yield
    except CommandFailed as failure:
        message = f"the cluster could not be created: {failure}. {ONE_HOST_HINT}"
        raise InputError(message) from failure
    finally:
        remove(os.getpid())


def remove_stale() -> None:
    """Remove the namespaces of runs that no longer exist."""
    owners = {int(NAME.fullmatch(name)[1]) for name in _namespaces()}
    for owner in owners:
        if not Path(f"/proc/{owner}").exists():
            remove(owner)


def remove(owner: int) -> None:
    """Remove the namespaces that process `owner` created, and kill what runs in them."""
    names = [name for name in _namespaces() if NAME.fullmatch(name)[1] == str(owner)]
    for name in names:
        _kill_all(name)
    for name in names:
        _run("ip", "netns", "delete", name)


def counters(process: int) -> dict[str, Counters]:
    """Byte counters of the interfaces in the namespace of a process, by interface name."""
    interfaces = {}
    for line in Path(f"/proc/{process}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        received, sent = (int(numbers.split()[column]) for column in (0, 8))
        interfaces[name.strip()] = Counters(sent, received)
    return interfaces


def free_port() -> int:
    """An unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CommandFailed(RuntimeError):
    """`ip` or `tc` refused."""


def _create(num_nodes: int, round_trip: float, stack: contextlib.ExitStack) -> None:
    names = [_name(f"node{node}") for node in range(num_nodes)]
    for name in names:
        _create_namespace(name)
    if round_trip:
        stack.enter_context(contextlib.closing(_join_by_delay_line(names, round_trip)))
    elif num_nodes == 2:
        _join(names[0], INTERFACE, names[1], INTERFACE)
    else:
        _join_by_bridge(names)
    for node, name in enumerate(names):
        _run("ip", "-n", name, "address", "add", f"{address(node)}/8", "dev", INTERFACE)
    for name, interface in _ends(num_nodes):
        _run("ip", "-n", name, "link", "set", interface, "up")


def _ends(num_nodes: int) -> list[tuple[str, str]]:
    """Both ends of every link as (namespace, interface)."""
    ends = [(_name(f"node{node}"), INTERFACE) for node in range(num_nodes)]
    if num_nodes > 2:
        ends += [(_name("hub"), f"port{node}") for node in range(num_nodes)]
    return ends


def _create_namespace(name: str) -> None:
    """Create a namespace without IPv6 and with Reno as TCP's congestion control.

    IPv6's neighbour discovery would be counted. On a link without losses or delay congestion
    control has nothing to detect; Reno, which every namespace may use, then does nothing, while BBR
    paces by its own estimates.
    """
    _run("ip", "netns", "add", name)
    settings = ("net.ipv6.conf.default.disable_ipv6=1", "net.ipv4.tcp_congestion_control=reno")
    for setting in settings:
        key, value = setting.split("=")
        path = f"/proc/sys/{key.replace('.', '/')}"
        _run("ip", "netns", "exec", name, "sh", "-c", f"[ ! -e {path} ] || echo {value} > {path}")
    _run("ip", "-n", name, "link", "set", LOOPBACK, "up")


def _join(name: str, interface: str, peer_name: str, peer_interface: str) -> None:
    """Join two namespaces by a veth pair."""
    mtu = ("mtu", str(MTU))
    _run(
        *("ip", "link", "add", interface, "netns", name, *mtu, "type", "veth"),
        *("peer", "name", peer_interface, "netns", peer_name, *mtu),
    )


def _join_by_bridge(names: Sequence[str]) -> None:
    """Join the nodes by a bridge in a namespace of its own."""
    hub = _name("hub")
    _create_namespace(hub)
    _run("ip", "-n", hub, "link", "add", "bridge0", "mtu", str(MTU), "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge0", "up")
    for node, name in enumerate(names):
        _join(name, INTERFACE, hub, f"port{node}")
        _run("ip", "-n", hub, "link", "set", f"port{node}", "master", "bridge0")


def _join_by_delay_line(names: Sequence[str], round_trip: float) -> DelayLine:
    """Join two nodes by devices whose frames arrive half a round trip later."""
    devices = [f"zpp{os.getpid()}-{node}" for node in range(len(names))]
    line = DelayLine(devices, round_trip / 2)
    for device, name in zip(devices, names, strict=True):
        _run("ip", "link", "set", device, "netns", name, "name", INTERFACE, "mtu", str(MTU))
    return line


def _name(part: str) -> str:
    return f"zeropp-{os.getpid()}-{part}"


def _namespaces() -> list[str]:
    """The namespaces of all runs of this module."""
    lines = _run("ip", "netns", "list").splitlines()
    names = [line.split()[0] for line in lines if line]
    return [name for name in names if NAME.fullmatch(name)]


def _kill_all(name: str) -> None:
    """Kill the processes in a namespace and wait until they have ended."""
    deadline = time.monotonic() + END_SECONDS
    while running := _run("ip", "netns", "pids", name).split():
        for process in running:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(int(process), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise CommandFailed(f"processes {' '.join(running)} in {name} do not end")
        time.sleep(0.02)


def _run(*command: str) -> str:
    """Run a command; returns its output, or raises CommandFailed with its error message."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
