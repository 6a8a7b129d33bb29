"""What this process's main thread is doing, seen from another thread."""

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

OWN_PACKAGES = ("megatron_zpp", "zeropp")
# Where a main thread is while it waits for other ranks; the innermost frames are looked at.
WAITING_IN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    "zeropp/ranks/waits.py",
    "zeropp/wire/in_flight.py",
    "zeropp/wire/rank_group.py",
)
INNERMOST = 6


@dataclass(frozen=True)
class Glance:
    """One look at the main thread.

    marks: how often it has said that it goes on. stack: identifies the code that it runs.
    waits: whether that is a collective. where: file, line and function, for a person: the innermost
    ones of both packages, and of all.
    """

    marks: int
    stack: int
    waits: bool
    where: str


class MainThread:
    """The main thread; it calls `mark` at points that all ranks pass in the same order."""

    def __init__(self) -> None:
        self._marks = 0
        self._ident = threading.main_thread().ident

    def mark(self) -> None:
        """Say that this rank goes on."""
        self._marks += 1

    def look(self) -> Glance:
        """Return what it is doing; to be called from another thread."""
        frames = _frames(sys._current_frames().get(self._ident))
        packages = [each.f_globals.get("__name__", "").partition(".")[0] for each in frames]
        own = [frames[packages.index(name)] for name in OWN_PACKAGES if name in packages]
        places = [_place(frame) for frame in dict.fromkeys((*own, *frames[:1]))]
        return Glance(
            marks=self._marks,
            stack=hash(tuple((frame.f_code, frame.f_lasti) for frame in frames)),
            waits=any(
                frame.f_code.co_filename.endswith(WAITING_IN) for frame in frames[:INNERMOST]
            ),
            where=", ".join(places),
        )


def _frames(innermost: FrameType | None) -> list[FrameType]:
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
