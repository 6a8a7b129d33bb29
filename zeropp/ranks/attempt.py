"""A part of the launcher's store for each attempt: ranks that are restarted begin with no keys.

torchrun's agent keeps one store for as long as it runs. What the ranks of an earlier attempt wrote,
such as the addresses at which they listened and which of them failed, would be taken for that of
the present ones. No variable of the environment tells attempts apart: agents of several machines
count restarts differently once a machine was lost. The ranks therefore agree on a name.
"""

import time
import uuid

import torch.distributed as dist

from zeropp.ranks.topology import Environment

POLL_SECONDS = 0.02


def attempt_store(store: dist.Store, environment: Environment) -> dist.Store:
    """Return the part of `store` that only the ranks of this attempt use; all ranks call it.

    Every rank announces itself under a name of its own. Rank 0 answers each announcement with the
    attempt's name until all ranks have confirmed it: what a rank of an earlier attempt announced is
    answered too, and nobody reads that. Raises `dist.DistStoreError` after the store's timeout.
    """
    meeting = dist.PrefixStore("attempts", store)
    if environment.rank == 0:
        name = uuid.uuid4().hex
        _admit(meeting, name, environment.world_size)
    else:
        own_name = uuid.uuid4().hex
        meeting.set(f"announced/{environment.rank}", own_name)
        name = meeting.get(f"attempt-of/{own_name}").decode()
        meeting.set(f"{name}/{environment.rank}", "")
    return dist.PrefixStore(f"attempt/{name}", store)


def _admit(meeting: dist.Store, name: str, world_size: int) -> None:
    """Answer with the attempt's name whoever announces itself, until all ranks have confirmed."""
    deadline = time.monotonic() + meeting.timeout.total_seconds()
    missing, answered = set(range(1, world_size)), set()
    while missing:
        for rank in sorted(missing):
            if meeting.check([f"{name}/{rank}"]):
                missing.remove(rank)
            elif meeting.check([f"announced/{rank}"]):
                announced = meeting.get(f"announced/{rank}").decode()
                if announced not in answered:
                    meeting.set(f"attempt-of/{announced}", name)
                    answered.add(announced)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"ranks {', '.join(map(str, sorted(missing)))} have not joined within "
                f"{meeting.timeout.total_seconds():g} s"
            )
        time.sleep(POLL_SECONDS if missing else 0)
