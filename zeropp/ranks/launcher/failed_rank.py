"""Which of the ranks that have ended failed first, and the line and exit code that say so."""

import os
import signal
import sys
import time
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zeropp.ranks.process_group import OTHER_RANK_FAILED

AGENT_SECONDS = 30  # the agent's, between SIGTERM and SIGKILL once a rank has failed
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class EndedChildren:
    """When each child of this process ended; the agent looks ten times a second and says not when.

    `times`: process id -> seconds since the epoch. Of children that end at the same moment
    only the first may be there. Installs a handler for SIGCHLD; the main thread must create it.
    """

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            signal.signal(signal.SIGCHLD, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # the agent was faster
            return
        if child is not None:
            self.times.setdefault(child.si_pid, time.time())


def report_failure(failures: dict[int, ProcessFailure], ended: dict[int, float]) -> int:
    """Print one line that names the rank that failed; return the launcher's exit code.

    `ended` are the times at which processes ended. That is the rank that ended first, with three
    exceptions. The kernel may close the connections of a crashed process before it reports its end,
    so that others fail first. A rank that says it ended because of another one (a hung one) is not
    the cause. Neither is one that the agent terminated, as it does with all after the first.
    """
    times = {rank: ended.get(each.pid, each.timestamp + 1) for rank, each in failures.items()}
    first = min(times.values())

    def in_time(rank: int) -> bool:
        return times[rank] - first < AGENT_SECONDS / 2

    def sort_key(rank: int) -> tuple[bool, bool, float, int]:
        code = failures[rank].exitcode
        crashed = -code in CRASHES and in_time(rank)
        terminated = code in (-signal.SIGTERM, 128 + signal.SIGTERM) and times[rank] != first
        return not crashed, terminated or code == OTHER_RANK_FAILED, times[rank], rank

    rank = min(failures, key=sort_key)
    code = failures[rank].exitcode
    if code > 0:
        print(f"zeropp: rank {rank} exited with code {code}", file=sys.stderr)
        return code
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and not in_time(rank):
        text = f"zeropp: rank {rank} did not respond and was ended with {name}"
    else:
        hint = " (often by the system, out of memory)" if code == -signal.SIGKILL else ""
        text = f"zeropp: rank {rank} was killed by {name}{hint}"
    print(text, file=sys.stderr)
    return 128 - code
