"""Notices when a rank dies or hangs, so that the others end soon and say which one it was.

Every rank beats once a second in the launcher's store and listens to the next rank's beat. The
first to know writes one verdict, which the others repeat: a collective that lost a peer would
otherwise report a broken connection, or wait for its time limit.
"""

import os
import sys
import threading
import time

import torch.distributed as dist

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0  # a rank without a beat for this long is given up
SUSPECT_SECONDS = 4.0  # the same, once a collective has failed
GRACE_SECONDS = 5.0  # what the main thread has to end by itself after a verdict


class Watch:
    """This rank's heartbeat and its view of the others; `close` ends it in peace."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = dist.PrefixStore("watch", store.clone())
        self._closed = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave without alarming the others."""
        self._store.set(f"done/{self.rank}", "")
        self._closed.set()
        self._thread.join()

    def blame_self(self, reason: str) -> bool:
        """Tell the others that this rank ends, and why; returns whether it was the first to."""
        return self._judge(f"rank {self.rank}: {reason}")

    def find_culprit(self) -> str | None:
        """After a failed collective: which rank ended it, or None if all others are alive."""
        before = self._beats()
        deadline = time.monotonic() + SUSPECT_SECONDS
        while time.monotonic() < deadline:
            if verdict := self._verdict():
                return verdict
            time.sleep(BEAT_SECONDS / 4)
        silent = [
            rank
            for rank, beat in self._beats().items()
            if beat == before[rank] and rank != self.rank and not self._finished(rank)
        ]
        if silent:
            self._judge(f"rank {silent[0]} died or stopped responding")
        return self._verdict()

    def _run(self) -> None:
        next_rank = (self.rank + 1) % self.num_ranks
        heard, heard_at, beat = "", time.monotonic(), 0
        while not self._closed.wait(BEAT_SECONDS):
            try:
                beat += 1
                self._store.set(f"beat/{self.rank}", str(beat))
                now, said = time.monotonic(), self._beat(next_rank)
                if said != heard:
                    heard, heard_at = said, now
                elif now - heard_at > SILENT_SECONDS and not self._finished(next_rank):
                    self._judge(f"rank {next_rank} died or stopped responding")
                verdict = self._verdict()
            except RuntimeError:  # the store lives with the launcher
                verdict = "the launcher is gone"
            if verdict and not self._closed.wait(GRACE_SECONDS):
                print(f"[rank {self.rank}] error: {verdict}; ending", file=sys.stderr, flush=True)
                os._exit(1)

    def _beats(self) -> dict[int, str]:
        return {rank: self._beat(rank) for rank in range(self.num_ranks)}

    def _beat(self, rank: int) -> str:
        return self._read(f"beat/{rank}") or ""

    def _finished(self, rank: int) -> bool:
        return self._read(f"done/{rank}") is not None

    def _verdict(self) -> str | None:
        return self._read("verdict")

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _judge(self, verdict: str) -> bool:
        stands = self._store.compare_set("verdict", "", verdict)  # the first one
        return stands.decode() == verdict
