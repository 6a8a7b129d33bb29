"""The addresses of this machine at which other ranks will connect to this one.

Gloo listens on the interfaces that GLOO_SOCKET_IFNAME names, or else at the address to which the
machine's host name resolves, or else on the loopback interface. PyTorch does not tell which one it
chose, so its rules are repeated here.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from zeropp.errors import NetworkError

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
LINK_LOCAL = "20"
# Scopes of IPv6 addresses in that file, in the order in which the system lists them elsewhere.
WIDEST_FIRST = MappingProxyType({"00": 0, "80": 0, "40": 1, LINK_LOCAL: 2, "10": 3})
BOOT_ID, NETWORK_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Address:
    """An address at which this rank will listen, and what it follows from."""

    ip: str
    reason: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback


def gloo_addresses(interfaces: str | None) -> list[Address]:
    """Return where gloo listens; `interfaces` is the value of GLOO_SOCKET_IFNAME.

    Raises NetworkError for an interface that this machine does not have.
    """
    if not interfaces:
        return [_host_address()]
    found = list_interfaces()
    addresses = []
    for name in interfaces.split(","):
        if found and not found.get(name):
            raise NetworkError(
                f"{GLOO_VARIABLE}={interfaces}: {socket.gethostname()} has no interface {name} "
                f"with an address; it has {describe(found)}"
            )
        addresses += [Address(ip, f"interface {name}") for ip in found.get(name, ())[:1]]
    return addresses


def require_nccl_interface(setting: str | None, *, alone: bool) -> None:
    """Raise NetworkError if NCCL_SOCKET_IFNAME allows no interface that others could reach.

    `setting` is its value: prefixes of names, `=` before names, `^` before names that are left out.
    `alone`: all ranks are on this machine.
    """
    found = list_interfaces()
    if not setting or not found:
        return
    names = setting.lstrip("^=").split(",")
    exact, excluded = setting.lstrip("^").startswith("="), setting.startswith("^")

    def is_allowed(interface: str) -> bool:
        named = interface in names if exact else interface.startswith(tuple(names))
        return named != excluded

    allowed = {name: ips for name, ips in found.items() if ips and is_allowed(name)}
    usable = [ip for ips in allowed.values() for ip in ips if alone or not _is_loopback(ip)]
    if not usable:
        others = "" if alone else " that other machines reach"
        raise NetworkError(
            f"{NCCL_VARIABLE}={setting}: {socket.gethostname()} has no such interface with an "
            f"address{others}; it has {describe(found)}"
        )


def list_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface of this machine; empty if unknown.

    They are in the order in which gloo finds them: IPv4, then IPv6, link-local addresses last.
    """
    if sys.platform != "linux":
        return {}
    import fcntl  # noqa: PLC0415  (not on every platform)

    found = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name, ips in found.items():
            with contextlib.suppress(OSError):  # it has no such address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket.fileno(), GET_ADDRESS, request)
                ips.append(socket.inet_ntoa(answer[20:24]))
    if IPV6_ADDRESSES.exists():
        lines = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
        for digits, _, _, scope, _, name in sorted(lines, key=lambda line: WIDEST_FIRST[line[3]]):
            zone = f"%{name}" if scope == LINK_LOCAL else ""
            if name in found:
                found[name].append(f"{ipaddress.IPv6Address(bytes.fromhex(digits))}{zone}")
    return found


def describe(interfaces: Mapping[str, Sequence[str]]) -> str:
    """List interfaces with their first addresses."""
    return ", ".join(f"{name} ({ips[0]})" for name, ips in interfaces.items() if ips) or "none"


def resolve(host: str) -> str | None:
    """Return the first address of a host's name; None if it is unknown."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        return None


def is_own(ip: str) -> bool:
    """Return whether this machine has an address."""
    family, kind, protocol, _, address = socket.getaddrinfo(ip, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
    return True


def source_towards(ip: str) -> str | None:
    """Return the address of this machine from which it sends to another one; None without a way."""
    family, *_, address = socket.getaddrinfo(ip, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(address)  # sends nothing
        except OSError:
            return None
        return sender.getsockname()[0]


def interface_of(ip: str) -> str | None:
    """Return the interface that has an address of this machine."""
    return next((name for name, ips in list_interfaces().items() if ip in ips), None)


def network_of_this_process() -> str:
    """Identify the network stack of this process, whose loopback addresses are its own."""
    if NETWORK_NAMESPACE.exists():
        return f"{BOOT_ID.read_text().strip()} {os.readlink(NETWORK_NAMESPACE)}"
    return socket.gethostname()


def _host_address() -> Address:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return Address(LOOPBACK, f"as its host name {name} resolves to no address")
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as trial:
            trial.bind(address)
            return Address(address[0], f"to which its host name {name} resolves")
    ips = ", ".join(dict.fromkeys(address[0] for *_, address in found))
    return Address(LOOPBACK, f"as its host name {name} resolves to {ips}, which it does not have")


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_loopback
