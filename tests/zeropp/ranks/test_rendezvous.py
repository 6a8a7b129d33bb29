"""How ranks meet in a store, whose part they share in an attempt, and the errors if they cannot."""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from zeropp.errors import NetworkError
from zeropp.ranks import process_group as rendezvous
from zeropp.ranks.process_group import attempt_store, open_store
from zeropp.ranks.topology import Environment

LIMIT = timedelta(seconds=20)


@pytest.fixture
def place(monkeypatch):
    """Set the environment of a rank of two; return what `Environment` reads."""
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.05)

    def of(
        rank: int, port: int | str, host: str = "127.0.0.1", launcher: bool = False
    ) -> Environment:
        for name, value in (
            ("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("MASTER_ADDR", host),
            ("MASTER_PORT", port), ("TORCHELASTIC_USE_AGENT_STORE", launcher),
        ):  # fmt: skip
            monkeypatch.setenv(name, str(value))
        return Environment.read()

    return of


@pytest.fixture
def other_program():
    """A port at which another program accepts connections and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_port_that_is_in_use(place, other_program):
    with pytest.raises(NetworkError, match=f"MASTER_PORT={other_program} is in use on "):
        open_store(place(0, other_program), LIMIT)
    for launcher in (False, True):
        began = time.monotonic()
        environment = place(1, other_program, launcher=launcher)
        with pytest.raises(NetworkError, match=f"127.0.0.1 port {other_program}, is not their"):
            open_store(environment, LIMIT)
        assert time.monotonic() - began < LIMIT.total_seconds() / 2


@pytest.mark.parametrize(
    ("host", "port"), [("", "29500"), ("node0", ""), ("node0", "29500x"), ("node0", "295000")]
)
def test_no_address_where_ranks_could_meet(host, port, place):
    for rank in (0, 1):
        with pytest.raises(
            NetworkError, match=f"has MASTER_ADDR='{host}' and MASTER_PORT='{port}'"
        ):
            open_store(place(rank, port, host), LIMIT)


def test_two_processes_that_are_both_rank_0(place):
    port = free_port()
    store = open_store(place(0, port), LIMIT)
    open_store(place(0, port), LIMIT)  # the same process may join again
    store.set("rank 0", "process 7 on node9")
    with pytest.raises(NetworkError, match="as rank 0, and so was process 7 on node9: give each"):
        open_store(place(0, port), LIMIT)


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("127.0.0.1", "127.0.0.1 port {}: "),
        ("node7.invalid", r"port {} \(here an unknown name\): "),
    ],
)
def test_a_launcher_that_cannot_be_reached(host, where, place):
    port = free_port()
    with pytest.raises(NetworkError, match="rank 1 on .* " + where.format(port)):
        open_store(place(1, port, host, launcher=True), LIMIT)


def test_a_rank_that_waits_for_rank_0_says_so(place, caplog):
    port = free_port()
    stores = []

    def be_late() -> None:
        time.sleep(1.5)
        stores.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    rank_0 = threading.Thread(target=be_late)
    rank_0.start()
    with caplog.at_level(logging.WARNING, "zeropp"):
        store = open_store(place(1, port), LIMIT)
    rank_0.join()
    store.set("key", "")
    assert stores[0].check(["key"])
    (message,) = caplog.messages
    assert message.endswith("Connection refused") and "for rank 0 at 127.0.0.1" in message
    with pytest.raises(NetworkError, match="cannot connect to where the ranks meet"):
        open_store(place(1, free_port()), timedelta(seconds=0.3))


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
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.1)
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
    monkeypatch.setattr(rendezvous, "PATIENCE_SECONDS", 0.1)
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(dist.DistStoreError):
        join(store, 1)
    (message,) = caplog.messages
    assert message.startswith("rank 1 on ") and "has waited 0 s for rank 0" in message
