"""The ranks of an attempt share a part of the store that those of earlier attempts do not reach."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zeropp.ranks import rendezvous as attempt_module
from zeropp.ranks.rendezvous import attempt_store
from zeropp.ranks.topology import Environment

WORLD = 3


def join(store: dist.Store, rank: int) -> dist.Store:
    return attempt_store(store, Environment(rank=rank, world_size=WORLD))


def attempt(store: dist.Store) -> list[dist.Store]:
    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(lambda rank: join(store, rank), reversed(range(WORLD))))


@pytest.fixture
def store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


def test_an_attempt_sees_its_own_keys_and_no_earlier_ones(store: dist.HashStore) -> None:
    first = attempt(store)
    first[0].set("failure", "rank 2 died")
    assert first[1].get("failure") == first[2].get("failure") == b"rank 2 died"
    for part in attempt(store):
        assert not part.check(["failure"])


def test_ranks_that_ended_before_rank_0_came_are_not_counted(store: dist.HashStore) -> None:
    """Their announcements remain in the store; the ranks that follow announce themselves anew."""
    for rank in (1, 2):
        dist.PrefixStore("attempts", store).set(f"announced/{rank}", f"dead{rank}")
    parts = attempt(store)
    parts[0].set("key", "")
    assert all(part.check(["key"]) for part in parts)


def test_a_rank_that_never_comes_is_named(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt_module, "PATIENCE_SECONDS", 0.1)
    store.set_timeout(timedelta(seconds=0.3))
    with ThreadPoolExecutor(2) as threads:
        joined = threads.submit(join, store, 1)
        with pytest.raises(dist.DistStoreError, match="ranks 2 have not joined within 0.3 s"):
            join(store, 0)
        joined.result()
    assert "ranks 2 have not joined for 0 s" in caplog.messages


def test_a_rank_that_hears_nothing_of_rank_0_says_so(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt_module, "PATIENCE_SECONDS", 0.1)
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError):
        join(store, 1)
    (message,) = caplog.messages
    assert message.startswith("rank 1 on ") and "has waited 0 s for rank 0" in message
