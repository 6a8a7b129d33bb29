"""A rank that cannot reach the store of all ranks says why, in time."""

import logging
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from zeropp.errors import NetworkError
from zeropp.ranks import rendezvous
from zeropp.ranks.rendezvous import open_store
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
