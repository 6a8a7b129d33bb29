"""Notices when a rank dies or hangs, so that the others end soon and say which rank it was.

On every rank a thread, the watch, writes once a second to the launcher's store what the main thread
is doing, and reads what the next rank wrote. A rank that writes nothing has died or was stopped. A
rank that writes may still have a main thread that hangs, as in a file system or a data worker: that
one has not moved for as long as the others have waited for it in a collective. The first rank to
notice a failure publishes it, and the others repeat it: otherwise a collective that lost a peer
would report a broken connection, or wait for its time limit.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from zeropp.errors import first_few
from zeropp.ranks import OTHER_RANK_FAILED, Liveness, Pulse

BEAT_SECONDS = 1.0
DEAD_SECONDS = 30.0  # without a heartbeat, or half of the time limit of collectives
SUSPECT_SECONDS = 4.0  # the same, once a collective has failed
GRACE_SECONDS = 5.0  # for the main thread to end by itself after a failure
STORE_GONE = "the launcher is gone"  # it keeps the store
STORE_SILENT = "the machine that keeps the store of the ranks no longer answers; ending"
MARGIN_SECONDS = 3.0  # before the time limit, or a quarter of it: to notice and to end within it


OWN_PACKAGES = ("megatron_zpp", "zeropp")
# Where a main thread is while it waits for other ranks; the innermost frames are looked at.
WAITING_IN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
    "zeropp/ranks/groups.py",
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


@dataclass(frozen=True)
class Beat:
    """What a rank writes: its number of beats, and for how many seconds `glance` has not changed.

    A main thread that waits for one collective after the other may look the same, but its marks
    change.
    """

    count: int
    still: float
    marks: int
    waits: bool
    where: str


class Heartbeat:
    """This rank's heartbeat and its view of the other ranks; `close` ends it.

    `limit`: the time limit of collectives in seconds, within which a rank that hangs is noticed.
    """

    def __init__(
        self, store: dist.Store, rank: int, num_ranks: int, main_thread: MainThread, limit: float
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._patience = limit - min(MARGIN_SECONDS, limit / 4)
        self._main_thread = main_thread
        self._glance, self._changed = main_thread.look(), time.monotonic()
        self._store = dist.PrefixStore("heartbeat", store.clone())
        self._ended, self._limit, self._count = threading.Event(), limit, 0
        self._next = Liveness(
            self._last_beat, dead_seconds=min(DEAD_SECONDS, limit / 2), look_seconds=0
        )
        self._write(0, self._glance)
        self._pulse = Pulse(self._turn, BEAT_SECONDS, "heartbeat")
        threading.Thread(target=self._guard, name="heartbeat guard", daemon=True).start()

    def close(self, *, keeps_store: bool = False) -> None:
        """Stop without alarming the other ranks.

        The rank that keeps the store of all waits until they have stopped, for `GRACE_SECONDS`.
        """
        self._pulse.close()
        deadline = time.monotonic() + (GRACE_SECONDS if keeps_store else 0)
        with suppress(RuntimeError):  # the store is gone, and so is everybody who would read it
            self._store.set(f"done/{self.rank}", "")
            while time.monotonic() < deadline and not all(map(self._is_done, self._others())):
                time.sleep(BEAT_SECONDS / 20)
        self._ended.set()

    def publish_own_failure(self, reason: str) -> bool:
        """Tell the other ranks that this rank ends; returns whether it is the first to fail.

        Also True if the store is gone, as then nobody knows.
        """
        try:
            return self._publish(f"rank {self.rank}: {reason}")
        except RuntimeError:
            return True

    def find_failure(self) -> str | None:
        """After a failed collective, say which rank failed; None if all other ranks are alive.

        Takes up to `SUSPECT_SECONDS`.
        """
        try:
            return self._find_failure()
        except RuntimeError:
            return STORE_GONE

    def _find_failure(self) -> str | None:
        before = {rank: self._beat(rank) for rank in self._others()}
        deadline = time.monotonic() + SUSPECT_SECONDS
        while time.monotonic() < deadline:
            if failure := self._failure():
                return failure
            time.sleep(BEAT_SECONDS / 4)
        for rank, beat in before.items():
            if beat == self._beat(rank) and not self._is_done(rank):
                self._publish(f"rank {rank} died or stopped responding")
        self._publish_hung(marks=self._glance.marks, waits=True)
        return self._failure()

    def is_of_this_rank(self, failure: str) -> bool:
        """Whether a published failure is this rank's."""
        return failure.startswith((f"rank {self.rank}:", f"rank {self.rank} "))

    def _turn(self) -> None:
        next_rank = (self.rank + 1) % self.num_ranks
        try:
            self._count += 1
            own = self._write(self._count, self._main_thread.look())
            if not self._next.is_alive(next_rank) and not self._is_done(next_rank):
                self._publish(f"rank {next_rank} died or stopped responding")
            if own.still > self._patience:
                self._publish_hung(own.marks, own.waits)
            failure = self._failure()
        except RuntimeError:
            failure = STORE_GONE
        if failure:
            self._end(failure)

    def _guard(self) -> None:
        """End the process if the watch itself hangs, for a store that no longer answers.

        A link that is cut breaks no connection for many minutes. Turns are counted rather than
        time, so that a process that was stopped for long does not end for that.
        """
        seen, turns = -1, 0
        while not self._ended.wait(BEAT_SECONDS):
            seen, turns = self._count, turns + 1 if self._count == seen else 0
            if turns * BEAT_SECONDS > self._limit:
                print(f"[rank {self.rank}] error: {STORE_SILENT}", file=sys.stderr, flush=True)
                os._exit(OTHER_RANK_FAILED)

    def _end(self, failure: str) -> None:
        """End the process, unless the main thread does so soon; one that hangs cannot."""
        own = self.is_of_this_rank(failure)
        hangs = own and failure.startswith(f"rank {self.rank} hangs")
        if hangs or not self._pulse.closed.wait(GRACE_SECONDS):
            print(f"[rank {self.rank}] error: {failure}; ending", file=sys.stderr, flush=True)
            os._exit(1 if own else OTHER_RANK_FAILED)

    def _write(self, count: int, glance: Glance) -> Beat:
        if glance != self._glance:
            self._glance, self._changed = glance, time.monotonic()
        still = time.monotonic() - self._changed
        beat = Beat(count, still, glance.marks, glance.waits, glance.where)
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
        return beat

    def _publish_hung(self, marks: int, waits: bool) -> None:
        """Publish which rank this one waits for, having passed `marks`, if one of them hangs.

        That is a rank that has not moved for as long, and has passed fewer marks, or is not in a
        collective while this one is. Where all wait, but not at the same place, one has left out
        what the others do, or does more. Where all are alike, all do something that takes long.
        """
        still = {}
        for rank in self._others():
            beat = self._beat(rank)
            if beat and beat.still > self._patience - BEAT_SECONDS and not self._is_done(rank):
                still[rank] = beat
        hung = {
            rank: beat
            for rank, beat in still.items()
            if beat.marks < marks or (waits and not beat.waits)
        }
        if hung:
            rank = min(hung, key=lambda rank: (hung[rank].marks, hung[rank].waits, rank))
            where, seconds = hung[rank].where, hung[rank].still
            self._publish(f"rank {rank} hangs: its main thread is at {where} for {seconds:.0f} s")
        elif waits and len(still) == self.num_ranks - 1:
            self._publish_apart(still)

    def _publish_apart(self, beats: dict[int, Beat]) -> None:
        """Publish which rank waits elsewhere than most; `beats` are those of all other ranks."""
        own = self._beat(self.rank)
        ranks_at: dict[str, list[int]] = {}
        for rank, beat in sorted((beats | {self.rank: own}).items()):
            ranks_at.setdefault(beat.where, []).append(rank)
        if len(ranks_at) == 1:
            return
        *elsewhere, most = sorted(ranks_at, key=lambda where: len(ranks_at[where]))
        places = "; ".join(f"{_listed(ranks_at[where])} at {where}" for where in elsewhere[1:])
        self._publish(
            f"rank {ranks_at[elsewhere[0]][0]} waits elsewhere than others for {own.still:.0f} s: "
            f"{_listed(ranks_at[elsewhere[0]])} at {elsewhere[0]}; "
            + (f"{places}; " if places else "")
            + f"{_listed(ranks_at[most])} at {most}. One rank has left out a step or a part of it, "
            "or does more than the others"
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.rank]

    def _last_beat(self, rank: int) -> str:
        return self._read(f"beat/{rank}") or ""

    def _beat(self, rank: int) -> Beat | None:
        text = self._last_beat(rank)
        return Beat(**json.loads(text)) if text else None

    def _is_done(self, rank: int) -> bool:
        return self._read(f"done/{rank}") is not None

    def _failure(self) -> str | None:
        return self._read("failure")

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _publish(self, failure: str) -> bool:
        first_failure = self._store.compare_set("failure", "", failure)
        return first_failure.decode() == failure


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {first_few([str(rank) for rank in ranks])}"
