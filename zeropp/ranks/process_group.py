"""The default process group: this rank's device, the backends that suit the machine, and the store.

The store is at MASTER_ADDR and MASTER_PORT. A launcher (torchrun, `zeropp`) has opened it before it
starts the ranks. Otherwise rank 0 opens it, and the others wait until rank 0 has started, which
takes as long as it takes.

torchrun's agent keeps one store for as long as it runs. What the ranks of an earlier attempt wrote,
such as the addresses at which they listened and which of them failed, would be taken for that of
the present ones. No variable of the environment tells attempts apart: agents of several machines
count restarts differently once a machine was lost. The ranks therefore agree on a name.
"""

import logging
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from zeropp.errors import InputError, NetworkError, first_few
from zeropp.ranks.groups import FAKE
from zeropp.ranks.reachability import refuse, require_reachable
from zeropp.ranks.topology import Environment

# Collectives of CPU tensors do not wait for the GPUs.
GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"
GLOO_OR_NCCL = re.compile("gloo|nccl")  # in the names of backends, others connect in other ways
REFUSAL_TIMEOUT = timedelta(seconds=5)
PATIENCE_SECONDS = 20.0  # for a store that should be there, and before a rank says that it waits
RETRY_SECONDS, POLL_SECONDS = 0.5, 0.02
LAST_PORT = 2**16 - 1
Connected = TypeVar("Connected")

log = logging.getLogger("zeropp")


def pick_device(environment: Environment) -> torch.device:
    """Return the GPU of this rank, after making it the current device; the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()  # else a device mesh would make that of the local rank the current one
    return device


def choose_backend(environment: Environment, num_gpus: int, requested: str | None) -> str:
    """Return `requested`, or the backend that suits a machine with `num_gpus` GPUs.

    That is gloo without a GPU, else NCCL for CUDA tensors and gloo for CPU tensors. Ranks that
    share a GPU use gloo for both, as NCCL before 2.30 does not support sharing. Raises InputError
    for NCCL without a GPU.
    """
    if not num_gpus:
        if requested == "nccl":
            raise InputError("the backend nccl needs a GPU, and PyTorch sees none: use gloo")
        return requested or "gloo"
    ranks_per_machine = math.ceil(environment.world_size / environment.machines)
    if requested is None and ranks_per_machine > num_gpus:
        log.info(
            "%d ranks share %d GPU(s), so they communicate through gloo",
            ranks_per_machine,
            num_gpus,
        )
        return "gloo"
    return GLOO_AND_NCCL if requested in (None, "nccl") else requested


def start_process_group(
    environment: Environment,
    device: torch.device,
    timeout: timedelta,
    backend: str | None = None,
    *,
    world: Environment | None = None,
) -> dist.Store:
    """Initialize the default process group, and return the store that all ranks share.

    With a `world` (`Environment.within`) the group is of its ranks alone, which use the part
    `world_store` of the store.

    `backend` is a name that PyTorch knows ("gloo", "nccl", ...), or None for the one that suits the
    machine. Raises NetworkError if the ranks cannot meet or cannot connect to each other.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    backend = choose_backend(environment, num_gpus, backend)
    store = open_store(environment, timeout)
    try:
        if backend != FAKE:  # else nobody comes
            store = attempt_store(store, environment)
        if environment.world_size > 1 and GLOO_OR_NCCL.search(backend):
            addresses = dist.PrefixStore("addresses", store)
            require_reachable(addresses, environment, with_nccl="nccl" in backend)
    except dist.DistNetworkError as error:
        raise NetworkError(
            f"rank {environment.rank} on {socket.gethostname()} has lost the store in which ranks "
            "meet: rank 0 or the launcher that keeps it has ended, and says why on its machine"
        ) from error
    except dist.DistStoreError as error:
        raise NetworkError(str(error)) from error
    own = world or environment
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", world_store(store, environment, own)),
        rank=own.rank,
        world_size=own.world_size,
        timeout=timeout,
    )
    return store


def world_store(store: dist.Store, environment: Environment, world: Environment) -> dist.Store:
    """Return the part of a store that is for the ranks of one world among all."""
    return dist.PrefixStore(f"world/{environment.rank // world.world_size}", store)


def refuse_to_start(environment: Environment, reason: str) -> None:
    """Tell the ranks that are in `start_process_group`, or soon will be, why this one ends."""
    with suppress(RuntimeError, InputError):  # they cannot be reached, or have ended as well
        store = attempt_store(open_store(environment, REFUSAL_TIMEOUT), environment)
        refuse(dist.PrefixStore("addresses", store), environment, reason)


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
        patience = min(timeout.total_seconds(), PATIENCE_SECONDS)
        store, _, _ = store_within(
            patience,
            partial(next, dist.rendezvous("env://", timeout=timedelta(seconds=patience))),
            lambda: (
                f"rank {environment.rank} on {socket.gethostname()}: what answers where the "
                f"ranks meet, {_where(environment)}, is not their store. Another program uses that "
                "port: give one that is free"
            ),
        )
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


def store_within(
    seconds: float, connect: Callable[[], Connected], problem: Callable[[], str]
) -> Connected:
    """Return what `connect`, which reaches a store, returns.

    What is no store may never answer, and torch would wait: NetworkError then says `problem()`.
    """
    answer: Future[Connected] = Future()

    def run() -> None:
        try:
            answer.set_result(connect())
        except Exception as error:  # noqa: BLE001  (raised by `result`)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except (dist.DistError, TimeoutError) as error:
        raise NetworkError(problem()) from error


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
    with suppress(OSError):
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
        late = [str(rank) for rank in sorted(missing)]
        if late and time.monotonic() > deadline:
            seconds = meeting.timeout.total_seconds()
            raise dist.DistStoreError(
                f"ranks {first_few(late)} have not joined within {seconds:g} s"
            )
        if late and time.monotonic() > notice:
            notice = deadline
            log.warning("ranks %s have not joined for %.0f s", first_few(late), PATIENCE_SECONDS)
        time.sleep(POLL_SECONDS if late else 0)
