"""The store of an elastic run, kept by a process that is no rank."""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from zeropp.errors import InputError, NetworkError
from zeropp.ranks.addresses import interface_of, resolve, source_towards
from zeropp.ranks.process_group import store_within
from zeropp.ranks.topology import gloo_interfaces

PATIENCE_SECONDS, RETRY_SECONDS = 30.0, 0.5
LAST_PORT = 2**16 - 1


def open_sync_store(address: str, timeout: timedelta) -> dist.Store:
    """Connect to the store at `address`, HOST:PORT; `timeout` is that of later requests.

    Raises InputError for what is no address, NetworkError if no store answers there.
    """
    host, port = split_address(address)
    _wait_until_reachable(host, port)
    store = store_within(
        PATIENCE_SECONDS,
        lambda: dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False),
        lambda: (
            f"what answers at zeropp.sync_store {address} is no store: let `zeropp --keep_store "
            "PORT` run there, on a port that no other program uses"
        ),
    )
    _use_interface_towards(host)
    return store


@contextmanager
def reported_store() -> Iterator[None]:
    """Raise a NetworkError, with what to do, if the store is lost in the block."""
    try:
        yield
    except dist.DistError as error:
        raise NetworkError(
            "the store at zeropp.sync_store was lost: start `zeropp --keep_store` again, and then "
            f"the nodes, which go on from their checkpoints ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    """Return what an error of torch says, without its trace."""
    return str(error).partition("\n")[0]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raises InputError for others."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
        raise InputError(
            f'zeropp.sync_store = "{address}": expected "HOST:PORT", as of a machine where '
            "`zeropp --keep_store PORT` runs"
        )
    return host.strip("[]"), int(port)


def keep_store(port: int, say: Callable[[str], None]) -> None:
    """Keep a store for replicas at a port of this machine until SIGINT or SIGTERM.

    Raises NetworkError if the port is in use. With port 0, a free one is chosen and said.
    """
    try:
        store = dist.TCPStore("localhost", port, None, True, wait_for_workers=False)
    except dist.DistError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise NetworkError(f"--keep_store {port}: the port is in use, give another one") from error
    say(f"nodes meet at {socket.gethostname()}:{store.port}")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(1):
        pass


def _wait_until_reachable(host: str, port: int) -> None:
    began = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), PATIENCE_SECONDS).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise NetworkError(
                f"{socket.gethostname()} cannot connect to zeropp.sync_store {host}:{port} "
                f"({reason}): start `zeropp --keep_store {port}` there, or name the address at "
                "which this machine reaches it"
            )
        time.sleep(RETRY_SECONDS)


def _use_interface_towards(host: str) -> None:
    """Let gloo listen where other nodes reach this machine, unless the user has chosen."""
    ip = resolve(host)
    source = None if ip is None else source_towards(ip)
    gloo_interfaces(None if source is None else interface_of(source))
