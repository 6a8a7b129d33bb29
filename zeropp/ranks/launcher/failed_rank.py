"""Which of the ranks that have ended failed first, and the line and exit code that say so."""

import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from zeropp.ranks.exit import OTHER_RANK_FAILED

END_SECONDS = 30  # between SIGTERM and SIGKILL once a rank has failed
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class EndedRank(NamedTuple):
    """The exit code of a rank's process, -N after signal N, and when it ended, in seconds."""

    code: int
    seconds: float


def report_failure(failures: Mapping[int, EndedRank]) -> int:
    """Print one line that names the rank that failed; return the launcher's exit code.

    That is the rank that ended first, with three exceptions. The kernel may close the connections
    of a crashed process before it reports its end, so that others fail first. A rank that says it
    ended because of another one (a hung one) is not the cause. Neither is one that the launcher
    terminated, as it does with all after the first.
    """
    first = min(each.seconds for each in failures.values())

    def in_time(rank: int) -> bool:
        return failures[rank].seconds - first < END_SECONDS / 2

    def sort_key(rank: int) -> tuple[bool, bool, float, int]:
        code, seconds = failures[rank]
        crashed = -code in CRASHES and in_time(rank)
        terminated = code in (-signal.SIGTERM, 128 + signal.SIGTERM) and seconds != first
        return not crashed, terminated or code == OTHER_RANK_FAILED, seconds, rank

    rank = min(failures, key=sort_key)
    code = failures[rank].code
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
