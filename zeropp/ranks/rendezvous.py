"""How a rank connects to the store in which all ranks meet, and the errors if it cannot.

The store is at MASTER_ADDR and MASTER_PORT. A launcher (torchrun, `zeropp`) has opened it before it
starts the ranks. Otherwise rank 0 opens it, and the others wait until rank 0 has started, which
takes as long as it takes.

torchrun's agent keeps one store for as long as it runs. What the ranks of an earlier attempt wrote,
such as the addresses at which they listened and which of them failed, would be taken for that of
the present ones. No variable of the environment tells attempts apart: agents of several machines
count restarts differently once a machine was lost. The ranks therefore agree on a name.
"""

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from zeropp.errors import NetworkError, first_few
from zeropp.ranks.topology import Environment

PATIENCE_SECONDS = 20.0  # for a store that should be there, and before a rank says that it waits
RETRY_SECONDS, POLL_SECONDS = 0.5, 0.02
LAST_PORT = 2**16 - 1

log = logging.getLogger("zeropp")


def open_store(environment: Environment, timeout: timedelta) -> dist.Store:
    """Connect to the store of all ranks, without joining a process group; return the store.

    `timeout` also applies to later requests. Raises NetworkError if no address is given or the
    store cannot be reached there, if its port is in use, or if something else answers there.
    """
    if not environment.launched:
        return dist.HashStore()
    _require_meeting_point(environment)
    if environment.rank == 0 and not environment.launcher_has_store:
        store = _create_store(environment, timeout)
    else:
        _wait_until_reachable(environment, timeout.total_seconds())
        store = _connect_to_store(environment, min(timeout.total_seconds(), PATIENCE_SECONDS))
    store.set_timeout(timeout)
    return store


def attempt_store(store: dist.Store, environment: Environment) -> dist.Store:
    """Return the part of `store` that only the ranks of this attempt use; all ranks call it.

    Every rank announces itself under a name of its own. Rank 0 answers each announcement with the
    attempt's name until all ranks have confirmed it. Announcements by ranks of an earlier attempt
    are answered too, without an effect. Raises `dist.DistStoreError` after the store's timeout.
    """
    meeting = dist.PrefixStore("attempts", store)
    if environment.rank == 0:
        name = uuid.uuid4().hex
        _admit(meeting, name, environment)
    else:
        own_name = uuid.uuid4().hex
        meeting.set(f"announced/{environment.rank}", own_name)
        name = _answer(meeting, f"attempt-of/{own_name}", environment)
        meeting.set(f"{name}/{environment.rank}", "")
    return dist.PrefixStore(f"attempt/{name}", store)


def _require_meeting_point(environment: Environment) -> None:
    host, port = environment.meeting_point
    if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
        raise NetworkError(
            f"rank {environment.rank} on {socket.gethostname()} has MASTER_ADDR={host!r} and "
            f"MASTER_PORT={port!r}: expected the address of the machine of rank 0, and a port from "
            f"1 to {LAST_PORT}, the same for all ranks (torchrun and zeropp set them)"
        )


def _create_store(environment: Environment, timeout: timedelta) -> dist.Store:
    """Open the store. Ranks that do not come are named later, so that it waits for none."""
    host, port = environment.meeting_point
    here = socket.gethostname()
    try:
        store = dist.TCPStore(
            host, int(port), None, True, timeout, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise NetworkError(
                f"MASTER_PORT={port} is in use on {here}, by another job or by what an earlier one "
                "has left: give a port that is free"
            ) from error
        raise NetworkError(f"rank 0 on {here} cannot let the ranks meet: {error}") from error
    own = f"process {os.getpid()} on {here}"
    first = store.compare_set("rank 0", "", own).decode()
    if first != own:
        raise NetworkError(
            f"{own} was started as rank 0, and so was {first}: give each process a RANK of its own "
            "(--node-rank of torchrun on each machine)"
        )
    return store


def _connect_to_store(environment: Environment, patience: float) -> dist.Store:
    """Return the store; raise NetworkError if another program answers, as torch would not."""
    answer: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=patience)))
            answer.set_result(store)
        except Exception as error:  # noqa: BLE001  (raised by `result`)
            answer.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return answer.result(patience)
    except (dist.DistError, TimeoutError) as error:
        raise NetworkError(
            f"rank {environment.rank} on {socket.gethostname()}: what answers where the ranks "
            f"meet, {_where(environment)}, is not their store. Another program uses that port: "
            "give one that is free"
        ) from error


def _wait_until_reachable(environment: Environment, timeout: float) -> None:
    """Return when something accepts connections where the ranks meet."""
    host, port = environment.meeting_point
    began, said = time.monotonic(), False
    patience = min(timeout, PATIENCE_SECONDS)
    while True:
        try:
            socket.create_connection((host, int(port)), patience).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        waited = time.monotonic() - began
        where = f"{_where(environment)}: {reason}"
        if waited > (patience if environment.launcher_has_store else timeout):
            raise NetworkError(
                f"rank {environment.rank} on {socket.gethostname()} cannot connect to where the "
                f"ranks meet, {where}. It must be an address of the first machine that this one "
                "reaches: name it by --rdzv-endpoint and --local-addr of torchrun, or MASTER_ADDR"
            )
        if waited > patience and not said:
            said = True
            who = f"rank {environment.rank} on {socket.gethostname()}"
            log.warning("%s has waited %.0f s for rank 0 at %s", who, waited, where)
        time.sleep(RETRY_SECONDS)


def _where(environment: Environment) -> str:
    """The meeting point, and to which addresses its name resolves on this machine."""
    host, port = environment.meeting_point
    ips: tuple[str, ...] = ()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ips = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    resolved = "" if ips == (host,) else f" (here {', '.join(ips) or 'an unknown name'})"
    return f"{host} port {port}{resolved}"


def _answer(meeting: dist.Store, key: str, environment: Environment) -> str:
    """Wait for rank 0's answer; say so if that takes long."""
    patience = min(meeting.timeout, timedelta(seconds=PATIENCE_SECONDS))
    try:
        meeting.wait([key], patience)
    except dist.DistStoreError:
        log.warning(
            f"rank {environment.rank} on {socket.gethostname()} has waited "
            f"{patience.total_seconds():.0f} s for rank 0 to answer at "
            f"{environment.meeting_point[0]}"
        )
    return meeting.get(key).decode()


def _admit(meeting: dist.Store, name: str, environment: Environment) -> None:
    """Answer each announcement with the attempt's name until all ranks have confirmed it."""
    began = time.monotonic()
    deadline, notice = began + meeting.timeout.total_seconds(), began + PATIENCE_SECONDS
    missing, answered = set(range(1, environment.world_size)), set()
    while missing:
        for rank in sorted(missing):
            if meeting.check([f"{name}/{rank}"]):
                missing.remove(rank)
            elif meeting.check([f"announced/{rank}"]):
                announced = meeting.get(f"announced/{rank}").decode()
                if announced not in answered:
                    meeting.set(f"attempt-of/{announced}", name)
                    answered.add(announced)
        late = first_few([str(rank) for rank in sorted(missing)])
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {late} have not joined within {meeting.timeout.total_seconds():g} s"
            )
        if missing and time.monotonic() > notice:
            notice = deadline
            log.warning("ranks %s have not joined for %.0f s", late, PATIENCE_SECONDS)
        time.sleep(POLL_SECONDS if missing else 0)
