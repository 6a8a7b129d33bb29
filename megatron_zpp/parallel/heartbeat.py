"""Notices when a rank dies or hangs, so that the others end soon and say which rank it was.

Every rank increments a counter in the launcher's store once a second and watches the counter of the
next rank. The first rank to notice a failure publishes it, and the others repeat it: otherwise a
collective that lost a peer would report a broken connection, or wait for its timeout.
"""

import os
import sys
import threading
import time

import torch.distributed as dist

BEAT_SECONDS = 1.0
DEAD_SECONDS = 30.0  # without a heartbeat
SUSPECT_SECONDS = 4.0  # the same, once a collective has failed
GRACE_SECONDS = 5.0  # for the main thread to end by itself after a failure


class Heartbeat:
    """This rank's heartbeat and its view of the other ranks; `close` ends it."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = dist.PrefixStore("heartbeat", store.clone())
        self._closed = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop without alarming the other ranks."""
        self._store.set(f"done/{self.rank}", "")
        self._closed.set()
        self._thread.join()

    def publish_own_failure(self, reason: str) -> bool:
        """Tell the other ranks that this rank ends; returns whether it is the first to fail."""
        return self._publish(f"rank {self.rank}: {reason}")

    def find_failure(self) -> str | None:
        """After a failed collective, say which rank failed; None if all other ranks are alive.

        Takes up to `SUSPECT_SECONDS`.
        """
        beats_before = self._beats()
        deadline = time.monotonic() + SUSPECT_SECONDS
        while time.monotonic() < deadline:
            if failure := self._failure():
                return failure
            time.sleep(BEAT_SECONDS / 4)
        silent_ranks = [
            rank
            for rank, beat in self._beats().items()
            if beat == beats_before[rank] and rank != self.rank and not self._is_done(rank)
        ]
        if silent_ranks:
            self._publish(f"rank {silent_ranks[0]} died or stopped responding")
        return self._failure()

    def _run(self) -> None:
        next_rank = (self.rank + 1) % self.num_ranks
        last_beat, last_change, count = "", time.monotonic(), 0
        while not self._closed.wait(BEAT_SECONDS):
            try:
                count += 1
                self._store.set(f"beat/{self.rank}", str(count))
                now, beat = time.monotonic(), self._beat(next_rank)
                if beat != last_beat:
                    last_beat, last_change = beat, now
                elif now - last_change > DEAD_SECONDS and not self._is_done(next_rank):
                    self._publish(f"rank {next_rank} died or stopped responding")
                failure = self._failure()
            except RuntimeError:  # the store lives with the launcher
                failure = "the launcher is gone"
            if failure and not self._closed.wait(GRACE_SECONDS):
                print(f"[rank {self.rank}] error: {failure}; ending", file=sys.stderr, flush=True)
                os._exit(1)

    def _beats(self) -> dict[int, str]:
        return {rank: self._beat(rank) for rank in range(self.num_ranks)}

    def _beat(self, rank: int) -> str:
        return self._read(f"beat/{rank}") or ""

    def _is_done(self, rank: int) -> bool:
        return self._read(f"done/{rank}") is not None

    def _failure(self) -> str | None:
        return self._read("failure")

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _publish(self, failure: str) -> bool:
        first_failure = self._store.compare_set("failure", "", failure)
        return first_failure.decode() == failure
