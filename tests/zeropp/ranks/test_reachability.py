"""Ranks that cannot connect to each other learn why before they try, all of them."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.cluster.network import emulation
from tests.benchmarks.cluster.namespaces import needs_namespaces
from tests.launched import ROOT
from zeropp.errors import NetworkError
from zeropp.ranks import reachability
from zeropp.ranks.addresses import LOOPBACK, Address, list_interfaces
from zeropp.ranks.reachability import require_reachable
from zeropp.ranks.topology import Environment

SETTINGS = {  # GLOO_SOCKET_IFNAME on each of two machines
    "right": ("eth0", "eth0"),
    "loopback": ("eth0", "lo"),
    "unreachable": ("spare", "eth0"),
    "missing": ("eth9,eth0", "eth0"),
}
RANK = f"""
import json
from dataclasses import replace
from datetime import timedelta
import torch.distributed as dist
from zeropp.errors import NetworkError
from zeropp.ranks.reachability import require_reachable
from zeropp.ranks.process_group import open_store
from zeropp.ranks.topology import Environment

environment, errors = Environment.read(), {{}}
store = open_store(environment, timedelta(seconds=60))
for name, interfaces in {SETTINGS!r}.items():
    own = replace(environment, gloo_interfaces=interfaces[environment.rank])
    try:
        require_reachable(dist.PrefixStore(name, store), own, with_nccl=False)
    except NetworkError as error:
        errors[name] = str(error)
print(json.dumps(errors), flush=True)
store.add("done", 1)
while environment.rank == 0 and store.add("done", 0) < 2:  # it keeps the store
    pass
"""


@needs_namespaces
def test_two_machines_with_wrong_interfaces():
    command = [sys.executable, "-c", RANK]
    with emulation.emulated_cluster(2):
        for node in range(2):  # an address that both have, as a container bridge's
            ip = ("ip", "-n", emulation.prefix(node)[-1])
            subprocess.run([*ip, "link", "add", "spare", "type", "veth"], check=True)
            subprocess.run([*ip, "address", "add", "172.31.9.1/24", "dev", "spare"], check=True)
            subprocess.run([*ip, "link", "set", "spare", "up"], check=True)
        meeting = {"MASTER_ADDR": emulation.address(0), "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        variables = os.environ | meeting | {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": "1"}
        began = time.monotonic()
        processes = [
            subprocess.Popen(
                [*emulation.prefix(node), *command],
                env=variables | {"RANK": str(node), "LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in range(2)
        ]
        first, second = (json.loads(process.communicate(timeout=120)[0]) for process in processes)
        took = time.monotonic() - began
    assert first == second and set(first) == {"loopback", "unreachable", "missing"}, first
    assert "rank 1 on " in first["loopback"]
    assert "the loopback address 127.0.0.1, interface lo; the interfaces" in first["loopback"]
    assert "rank 1 on " in first["unreachable"]
    assert "cannot connect to rank 0 on " in first["unreachable"]
    assert " at 172.31.9.1, interface spare" in first["unreachable"]
    assert "rank 0: GLOO_SOCKET_IFNAME=eth9,eth0: " in first["missing"]
    found = f"it has lo (127.0.0.1), eth0 ({emulation.address(0)})"
    assert f"has no interface eth9 with an address; {found}" in first["missing"]
    assert all("Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME" in text for text in first.values())
    assert took < 100  # of which the connections take at most DIAL_SECONDS


def errors_of(*environments: Environment, with_nccl: bool = False) -> list[str | None]:
    store = dist.HashStore()

    def join(environment: Environment) -> str | None:
        try:
            require_reachable(store, environment, with_nccl=with_nccl)
        except NetworkError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(environments)) as threads:
        return list(threads.map(join, environments))


def ranks_of(count: int, **settings: object) -> list[Environment]:
    return [Environment(rank=rank, world_size=count, **settings) for rank in range(count)]


def test_loopback_addresses_are_for_one_machine(monkeypatch):
    settings = {"gloo_interfaces": "lo0" if sys.platform == "darwin" else "lo"}
    assert errors_of(*ranks_of(3, **settings)) == [None] * 3
    of_thread = threading.local()

    def own_network() -> str:
        of_thread.name = threading.current_thread().name
        return of_thread.name

    monkeypatch.setattr(reachability, "network_of_this_process", own_network)
    if not list_interfaces():
        pytest.skip("the interfaces of this system are not known")
    errors = errors_of(*ranks_of(2, **settings))
    assert errors[0] == errors[1] and "rank 0" in errors[0] and "rank 1" in errors[0]


@pytest.mark.skipif(not list_interfaces(), reason="the interfaces of this system are not known")
def test_wrong_settings_are_said_by_all_ranks_of_one_machine():
    wrong = Environment(rank=1, world_size=2, gloo_interfaces="nowhere0")
    first, second = errors_of(Environment(rank=0, world_size=2), wrong)
    assert first == second and "rank 1: GLOO_SOCKET_IFNAME=nowhere0" in first
    for setting in ("nowhere0", "=l", "^lo,eth,e,w,b,d,i,t,v"):
        texts = errors_of(*ranks_of(2, nccl_interfaces=setting), with_nccl=True)
        assert texts[0] == texts[1] and f"NCCL_SOCKET_IFNAME={setting}: " in texts[0], setting
    assert errors_of(*ranks_of(2, nccl_interfaces="lo"), with_nccl=True) == [None, None]
    many = ranks_of(2, machines=2, nccl_interfaces="=lo")
    assert "that other machines reach" in errors_of(*many, with_nccl=True)[0]


def test_an_address_at_which_a_rank_cannot_listen_is_said_by_all(monkeypatch):
    def found(interfaces: str | None) -> list[Address]:
        return [Address(interfaces, "interface eth7")]

    monkeypatch.setattr(reachability, "gloo_addresses", found)
    right, wrong = (  # TEST-NET-2, which no machine has
        Environment(rank=rank, world_size=2, gloo_interfaces=ip)
        for rank, ip in enumerate((LOOPBACK, "198.51.100.7"))
    )
    first, second = errors_of(right, wrong)
    assert first == second and "cannot listen at 198.51.100.7, interface eth7: " in first


def test_a_rank_that_ended_before_it_said_its_address_is_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(NetworkError, match="rank 1 has not said .* it may have ended"):
        require_reachable(store, Environment(rank=0, world_size=2), with_nccl=False)


def test_ranks_that_were_told_of_different_numbers_of_ranks():
    other = Environment(rank=1, world_size=3)
    first, second = errors_of(Environment(rank=0, world_size=2), other)
    assert first == second
    assert re.search("rank 1 on .* with WORLD_SIZE=3, rank 0 on .* with WORLD_SIZE=2", first)
    assert "GLOO_SOCKET_IFNAME" not in first


def test_rank_0_ends_after_the_others_have_read_the_verdict():
    """It may keep the store from which they read."""
    store, (first, second) = dist.HashStore(), ranks_of(2)
    waiting = threading.Thread(target=reachability._wait_until_heard, args=(store, first))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    reachability._wait_until_heard(store, second)
    waiting.join(reachability.HEAR_SECONDS / 2)
    assert not waiting.is_alive()
