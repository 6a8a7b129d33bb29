"""Where the launchers of several machines meet: a port of the first one, which others must reach.

What PyTorch says there itself is a traceback after its time limit. Here each machine looks first.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zeropp.errors import NetworkError
from zeropp.ranks.addresses import (
    GLOO_VARIABLE,
    Address,
    describe,
    gloo_addresses,
    interface_of,
    is_own,
    list_interfaces,
    resolve,
    source_towards,
)

MEET_SECONDS = 120  # between the starts of the first and the last machine
PATIENCE_SECONDS, DIAL_SECONDS, RETRY_SECONDS = 15, 10, 0.5
LEAVE_SECONDS = 5  # for the other machines, before the first one closes the store


@dataclass(frozen=True)
class MeetingPoint:
    """`address` and `port` of the first of `num_nodes` machines, of which this one is `node`."""

    address: str
    port: int
    num_nodes: int
    node: int

    @property
    def ip(self) -> str:
        """The address in numbers; raises NetworkError for a name that is unknown here."""
        found = resolve(self.address)
        if found is None:
            raise NetworkError(
                f"{socket.gethostname()} does not know the name --master_addr {self.address}: "
                "give the address of the first machine in numbers"
            )
        return found

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"

    def interface(self) -> str | None:
        """Return the interface of this machine by which it reaches the first one."""
        source = source_towards(self.ip)
        return None if source is None else interface_of(source)

    def require_interfaces(self, setting: str | None) -> None:
        """Raise NetworkError if others cannot reach this machine where gloo will listen."""
        addresses = gloo_addresses(setting)
        if not Address(self.ip, "").is_loopback and addresses[0].is_loopback:
            raise NetworkError(
                f"other machines do not reach {socket.gethostname()} at {addresses[0].ip}, "
                f"{addresses[0].reason}: let {GLOO_VARIABLE} name the interface that connects the "
                f"machines, one of {describe(list_interfaces())}, or leave it out"
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[dist.Store]:
        """Keep the store open, which the ranks use too, until all machines have left it.

        Raises NetworkError if the machines do not meet.
        """
        self._require_reachable()
        first = self.node == 0
        limit = timedelta(seconds=MEET_SECONDS)
        options = {"wait_for_workers": False, "multi_tenant": True}
        try:
            store = dist.TCPStore(self.address, self.port, None, first, limit, **options)
            yield store
        except dist.DistError as error:
            raise self._explain(error) from error
        with contextlib.suppress(dist.DistError):  # the first machine may have failed and left
            store.add("left", 1)
            end = time.monotonic() + LEAVE_SECONDS
            while first and store.add("left", 0) < self.num_nodes and time.monotonic() < end:
                time.sleep(RETRY_SECONDS / 10)

    def _require_reachable(self) -> None:
        """Return when this machine can connect there."""
        here = socket.gethostname()
        if self.node == 0:
            if not is_own(self.ip):
                raise NetworkError(
                    f"--master_addr {self.address} is no address of the first machine, {here}: it "
                    f"has {describe(list_interfaces())}"
                )
            return
        began, said = time.monotonic(), False
        while reason := self._refusal():
            waited = time.monotonic() - began
            if waited > MEET_SECONDS:
                raise NetworkError(
                    f"{here} cannot connect to the first machine at {self} ({reason}): let its "
                    "firewall pass that port and those of the ranks from this machine, or give "
                    "another address by --master_addr, another port by --master_port"
                )
            if waited > PATIENCE_SECONDS and not said:
                said = True
                print(f"zeropp: {here} waits for the first machine at {self}: {reason}", flush=True)
            time.sleep(RETRY_SECONDS)

    def _refusal(self) -> str:
        try:
            socket.create_connection((self.address, self.port), DIAL_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _explain(self, error: dist.DistError) -> NetworkError:
        """Say why the machines did not meet."""
        here = socket.gethostname()
        if "EADDRINUSE" in str(error):
            return NetworkError(
                f"port {self.port} is in use on {here}, by another job or by what an earlier one "
                "has left: give another one by --master_port"
            )
        first = str(error).splitlines()[0]
        return NetworkError(
            f"the {self.num_nodes} machines did not meet at {self} within {MEET_SECONDS} s, says "
            f"{here}: {first}"
        )
