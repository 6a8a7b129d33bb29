"""Emulated clusters: bytes are counted, and nothing stays behind."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.cluster.network import emulation
from benchmarks.cluster.network.emulation import bits_per_second, counters, emulated_cluster
from tests.benchmarks.cluster.namespaces import namespaces_of, needs_namespaces
from tests.launched import ROOT
from zeropp.errors import InputError

SLEEP = "import time; time.sleep(60)"


def test_rates_are_read_and_what_is_none_is_said():
    rates = {"200mbit": 2e8, "1gbit": 1e9, "2.5gbit": 2.5e9, "64kbit": 6.4e4, "none": None}
    assert {text: bits_per_second(text) for text in rates} == rates
    for text in ("", "200", "mbit", "0mbit", "-1mbit", "1.2.3gbit", "9 parsecs"):
        with pytest.raises(InputError, match="as in 200mbit, or none"):
            bits_per_second(text)


def test_who_lacks_tools_or_is_not_root_is_told_of_one_host(monkeypatch: pytest.MonkeyPatch):
    for missing in ("ip", "tc", None):
        monkeypatch.setattr(shutil, "which", lambda tool, m=missing: None if tool == m else tool)
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        reason = f"no command {missing} here.*iproute2" if missing else "only root can "
        with pytest.raises(InputError, match=f"{reason}.*--one-host"):
            emulation.require_namespaces()


@needs_namespaces
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_bytes_between_nodes_are_counted_and_nothing_stays_behind(num_nodes: int):
    size = 500_000
    receive = (
        f"import socket; s = socket.create_server(('', 7000)); print('ready', flush=True);"
        f"c, _ = s.accept(); left = {size}\n"
        "while left: left -= len(c.recv(left))\n"
        "c.sendall(b'x'); time.sleep(60)"
    )
    with emulated_cluster(num_nodes):
        emulation.set_rate(num_nodes, "1gbit")
        emulation.set_rate(num_nodes, "50mbit")
        last = num_nodes - 1
        send = (
            f"import socket; s = socket.create_connection(('{emulation.address(last)}', 7000));"
            f"s.sendall(bytes({size})); s.recv(1); print('done', flush=True); time.sleep(60)"
        )
        command = [sys.executable, "-c"]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        receiver = subprocess.Popen(
            [*emulation.prefix(last), *command, f"import time; {receive}"], **pipes
        )
        assert receiver.stdout.readline() == "ready\n"
        before = counters(receiver.pid)["eth0"]
        started = time.monotonic()
        sender = subprocess.Popen([*emulation.prefix(0), *command, f"import time; {send}"], **pipes)
        assert sender.stdout.readline() == "done\n"
        taken = time.monotonic() - started
        arrived = (counters(receiver.pid)["eth0"] - before).received
        # payload, 66 bytes of headers in each packet of at most 9000 bytes, and a few small ones;
        # TCP sends a packet again where a busy machine acknowledges it late
        assert size * 9000 / 8934 <= arrived <= size * 1.1
        assert counters(sender.pid)["eth0"].sent == pytest.approx(arrived, abs=500)
        assert taken > 0.95 * 8 * size / 50e6
        assert emulation.dropped() == 0
        assert len(namespaces_of(os.getpid())) == (2 if num_nodes == 2 else num_nodes + 1)
    assert not namespaces_of(os.getpid())
    for process in (sender, receiver):
        assert process.wait(timeout=5) == -signal.SIGKILL


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next():
    program = (
        "import subprocess, sys\n"
        "from benchmarks.cluster.network import emulation\n"
        "with emulation.emulated_cluster(2):\n"
        f"    subprocess.Popen([*emulation.prefix(1), sys.executable, '-c', {SLEEP!r}])\n"
        "    print('ready', flush=True)\n"
        "    input()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout.readline() == "ready\n"
    left = namespaces_of(run.pid)
    assert len(left) == 2
    emulation.remove_stale()
    assert namespaces_of(run.pid) == left  # it lives
    run.kill()
    run.wait()
    assert namespaces_of(run.pid) == left
    emulation.remove_stale()
    assert not namespaces_of(run.pid)


@needs_namespaces
def test_a_mistake_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), emulated_cluster(3):
        _ = 1 / 0
    assert not namespaces_of(os.getpid())


@needs_namespaces
def test_what_the_system_refuses_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emulation, "MTU", 10)  # less than any link may have
    with pytest.raises(InputError, match="could not be created: ip link add.*--one-host"):
        with emulated_cluster(2):
            pass
    assert not namespaces_of(os.getpid())


@needs_namespaces
def test_a_round_trip_takes_as_long_as_asked_for():
    echo = (
        "import socket; s = socket.create_server(('', 7000)); print('ready', flush=True);"
        "c, _ = s.accept(); c.sendall(c.recv(1))"
    )
    ask = (
        f"import socket, time; s = socket.create_connection(('{emulation.address(1)}', 7000));"
        "begin = time.monotonic(); s.sendall(b'x'); s.recv(1); print(time.monotonic() - begin)"
    )
    with emulated_cluster(2, round_trip=0.05):
        emulation.set_rate(2, "50mbit")
        command = [sys.executable, "-c"]
        pipe = {"stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([*emulation.prefix(1), *command, echo], **pipe) as answering:
            assert answering.stdout.readline() == "ready\n"
            asking = subprocess.run([*emulation.prefix(0), *command, ask], **pipe, check=True)
        assert float(asking.stdout) >= 0.05
    assert not namespaces_of(os.getpid())
