"""Addresses of stores: what is none, and where no store answers."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from zeropp.capabilities.local_sgd import sync_store
from zeropp.errors import InputError, NetworkError

LIMIT = timedelta(seconds=20)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_store, "PATIENCE_SECONDS", 1.0)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where something listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("address", ["", "host", "host:", ":29500", "host:0", "host:70000", "h:p"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InputError, match=r'expected "HOST:PORT", as of a machine where'):
        sync_store.split_address(address)


@pytest.mark.usefixtures("soon")
def test_where_nobody_listens(silent_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(NetworkError, match=f"start `zeropp --keep_store {free}` there"):
        sync_store.open_sync_store(f"127.0.0.1:{free}", LIMIT)


@pytest.mark.usefixtures("soon")
def test_where_another_program_listens(silent_port: int) -> None:
    with pytest.raises(NetworkError, match="is no store"):
        sync_store.open_sync_store(f"127.0.0.1:{silent_port}", LIMIT)


def test_a_store_that_is_lost_is_named() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    store = sync_store.open_sync_store(f"127.0.0.1:{kept.port}", LIMIT)
    store.set("key", "value")
    del kept
    with pytest.raises(NetworkError, match="start `zeropp --keep_store` again"):
        with sync_store.reported_store():
            while True:
                store.get("key")
                threading.Event().wait(0.01)
