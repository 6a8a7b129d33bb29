"""Checks that ranks can connect: each says at which address others will dial it, and some try.

Without this check, a host name that resolves to a loopback address, or an interface that other
machines cannot reach, fails on one machine with a traceback and leaves the others waiting. All
ranks use the launcher's store, which they have reached; rank 0 decides, and all raise the same
error.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

import torch.distributed as dist

from zeropp.errors import NetworkError, first_lines
from zeropp.ranks.addresses import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    Address,
    describe,
    gloo_addresses,
    list_interfaces,
    network_of_this_process,
    require_nccl_interface,
)
from zeropp.ranks.topology import Environment

DIAL_SECONDS = 10.0
HEAR_SECONDS = 5.0  # for all to read the verdict, before the rank that keeps the store ends
POLL_SECONDS = 0.02
MOST_SHOWN = 8
ADVICE = (
    f"Set {GLOO_VARIABLE} (and {NCCL_VARIABLE} for NCCL) on every machine to the interface that "
    "connects the machines, as in GLOO_SOCKET_IFNAME=eth0, or let each host name resolve to the "
    "address of that interface"
)


@dataclass(frozen=True, kw_only=True)
class RankAddresses:
    """Where a rank will be dialed: (ip, port, reason) of each address, on which `host`.

    world_size: the number of ranks that this one was started with.
    network: identifies its network stack. interfaces: those of its machine, for a person.
    problem: what is wrong with its settings.
    refusal: why it does not start at all.
    """

    host: str
    world_size: int
    network: str
    addresses: list[tuple[str, int, str]] = field(default_factory=list)
    interfaces: str = ""
    problem: str = ""
    refusal: str = ""


def require_reachable(store: dist.Store, environment: Environment, *, with_nccl: bool) -> None:
    """Raise NetworkError on all ranks if ranks of other machines cannot connect to one of them.

    All ranks call it. `store` is one that all reach, and is used by nobody else.
    """
    rank = str(environment.rank)
    with _listening(environment, with_nccl=with_nccl) as place:
        store.set(f"place/{rank}", json.dumps(asdict(place)))
        if environment.rank == 0:
            places = [_place_of(store, other) for other in range(environment.world_size)]
            mismatches = _refusals(places) or _mismatches(places)
            problems = mismatches or _problems(places)
            plan = {} if problems else _plan(places)
            store.set("plan", json.dumps(plan))
        else:
            plan = json.loads(store.get("plan"))
        if rank in plan:
            store.set(f"dialed/{rank}", _dial(place, environment.rank, **plan[rank]))
        if environment.rank == 0:
            problems += filter(None, (store.get(f"dialed/{other}").decode() for other in plan))
            text = first_lines(problems, MOST_SHOWN) if problems else ""
            store.set("verdict", f"{text}\n{ADVICE}" if problems and not mismatches else text)
        verdict = store.get("verdict").decode()
    if verdict:
        _wait_until_heard(store, environment)
        raise NetworkError(f"the ranks cannot start together:\n  {verdict}")


def refuse(store: dist.Store, environment: Environment, reason: str) -> None:
    """Tell the ranks that call `require_reachable` why this rank does not start."""
    place = RankAddresses(
        host=socket.gethostname(),
        world_size=environment.world_size,
        network=network_of_this_process(),
        refusal=reason,
    )
    store.set(f"heard/{environment.rank}", "")
    store.set(f"place/{environment.rank}", json.dumps(asdict(place)))


@contextmanager
def _listening(environment: Environment, *, with_nccl: bool) -> Iterator[RankAddresses]:
    """Listen where this rank will be dialed; yield that place."""
    here = partial(
        RankAddresses,
        host=socket.gethostname(),
        world_size=environment.world_size,
        network=network_of_this_process(),
    )
    with ExitStack() as listening:
        try:
            if with_nccl:
                alone = environment.machines == 1
                require_nccl_interface(environment.nccl_interfaces, alone=alone)
            listed = []
            for address in gloo_addresses(environment.gloo_interfaces):
                port = listening.enter_context(_listener(address)).getsockname()[1]
                listed.append((address.ip, port, address.reason))
            place = here(addresses=listed, interfaces=describe(list_interfaces()))
        except NetworkError as error:
            place = here(problem=str(error))
        yield place


def _listener(address: Address) -> socket.socket:
    try:
        info = socket.getaddrinfo(address.ip, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(*info[:3])
        listener.bind(info[4])
        listener.listen()
    except OSError as error:
        raise NetworkError(
            f"{socket.gethostname()} cannot listen at {address.ip}, {address.reason}: "
            f"{error.strerror}"
        ) from error
    return listener


def _place_of(store: dist.Store, rank: int) -> RankAddresses:
    try:
        return RankAddresses(**json.loads(store.get(f"place/{rank}")))
    except dist.DistStoreError as error:
        raise NetworkError(
            f"rank {rank} has not said where it can be reached within "
            f"{store.timeout.total_seconds():g} s: it may have ended, and then says why on its "
            "machine"
        ) from error


def _wait_until_heard(store: dist.Store, environment: Environment) -> None:
    """Let rank 0, which may keep the store, wait until all others have read the verdict."""
    if environment.rank != 0:
        store.set(f"heard/{environment.rank}", "")
        return
    keys = [f"heard/{rank}" for rank in range(1, environment.world_size)]
    deadline = time.monotonic() + HEAR_SECONDS
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _refusals(places: Sequence[RankAddresses]) -> list[str]:
    """Name the ranks that do not start, and why."""
    return [
        f"rank {rank} on {place.host} has ended: {place.refusal}"
        for rank, place in enumerate(places)
        if place.refusal
    ]


def _mismatches(places: Sequence[RankAddresses]) -> list[str]:
    """Name the ranks that were started with another number of ranks."""
    return [
        f"rank {rank} on {place.host} was started with WORLD_SIZE={place.world_size}, rank 0 on "
        f"{places[0].host} with WORLD_SIZE={len(places)}: give all of them the same number"
        for rank, place in enumerate(places)
        if place.world_size != len(places)
    ]


def _problems(places: Sequence[RankAddresses]) -> list[str]:
    """Name the problems that are known before any rank dials."""
    problems = [
        f"rank {rank}: {place.problem}" for rank, place in enumerate(places) if place.problem
    ]
    if len({place.network for place in places}) == 1:
        return problems
    for rank, place in enumerate(places):
        for ip, _, reason in place.addresses:
            if Address(ip, reason).is_loopback and rank in _firsts(places):
                problems.append(
                    f"rank {rank} on {place.host} would be dialed at the loopback address {ip}, "
                    f"{reason}; the interfaces of {place.host} are {place.interfaces}"
                )
    return problems


def _firsts(places: Sequence[RankAddresses]) -> list[int]:
    """The first rank of each machine."""
    first: dict[str, int] = {}
    for rank, place in enumerate(places):
        first.setdefault(place.network, rank)
    return list(first.values())


def _plan(places: Sequence[RankAddresses]) -> dict[str, dict]:
    """Return which rank dials which: the first rank of each machine dials that of the next one."""
    firsts = _firsts(places)
    if len(firsts) == 1:
        return {}
    following = [*firsts[1:], firsts[0]]
    return {
        str(rank): {"other": other, "at": asdict(places[other])}
        for rank, other in zip(firsts, following, strict=True)
    }


def _dial(own: RankAddresses, rank: int, other: int, at: Mapping) -> str:
    """Connect to another rank; return what is wrong, or nothing."""
    place = RankAddresses(**at)
    for ip, port, reason in place.addresses:
        try:
            socket.create_connection((ip, port), DIAL_SECONDS).close()
        except OSError as error:
            return (
                f"rank {rank} on {own.host} (interfaces {own.interfaces}) cannot connect to rank "
                f"{other} on {place.host} at {ip}, {reason}: {error.strerror or error}; the "
                f"interfaces of {place.host} are {place.interfaces}"
            )
    return ""
