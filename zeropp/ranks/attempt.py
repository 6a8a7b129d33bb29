"""A part of the launcher's store for each attempt: ranks that are restarted begin with no keys.

torchrun's agent keeps one store for as long as it runs. What the ranks of an earlier attempt wrote,
such as the addresses at which they listened and which of them failed, would be taken for that of
the present ones. No variable of the environment tells attempts apart: agents of several machines
count restarts differently once a machine was lost. The ranks therefore agree on a name.
"""

import logging
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from zeropp.errors import first_few
from zeropp.ranks.topology import Environment

POLL_SECONDS = 0.02
NOTICE_SECONDS = 20.0  # after which a rank that waits for others says so

log = logging.getLogger("zeropp")


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


def _answer(meeting: dist.Store, key: str, environment: Environment) -> str:
    """Wait for rank 0's answer; say so if that takes long."""
    patience = min(meeting.timeout, timedelta(seconds=NOTICE_SECONDS))
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
    deadline, notice = began + meeting.timeout.total_seconds(), began + NOTICE_SECONDS
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
            log.warning("ranks %s have not joined for %.0f s", late, NOTICE_SECONDS)
        time.sleep(POLL_SECONDS if missing else 0)
