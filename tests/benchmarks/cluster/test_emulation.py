"""Emulated clusters: what is made, what is counted, and that nothing stays behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.cluster.crew import Crew, Host, RankFailed, started_crew

from benchmarks.cluster import emulation
from benchmarks.cluster.emulation import bits_per_second, counters, emulated_cluster
from tests.benchmarks.cluster.namespaces import namespaces_of, needs_namespaces
from zeropp.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200mbit", 2e8), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("64kbit", 6.4e4), ("none", None)],
)
def test_rates_are_read(text: str, rate: float | None):
    assert bits_per_second(text) == rate


@pytest.mark.parametrize("text", ["", "200", "mbit", "0mbit", "-1mbit", "1.2.3gbit", "9 parsecs"])
def test_what_is_no_rate_is_said(text: str):
    with pytest.raises(InputError, match="as in 200mbit, or none"):
        bits_per_second(text)


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    with pytest.raises(InputError, match=f"no command {missing} here.*iproute2.*--one-host"):
        emulation.require_means()


def test_who_is_not_root_is_told_of_one_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="by root only. --one-host"):
        emulation.require_means()


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
    with emulated_cluster(num_nodes, "50mbit") as cluster:
        last = num_nodes - 1
        send = (
            f"import socket; s = socket.create_connection(('{cluster.address(last)}', 7000));"
            f"s.sendall(bytes({size})); s.recv(1); print('done', flush=True); time.sleep(60)"
        )
        command = [sys.executable, "-c"]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        receiver = subprocess.Popen(
            [*cluster.inside(last), *command, f"import time; {receive}"], **pipes
        )
        assert receiver.stdout.readline() == "ready\n"
        before = counters(receiver.pid)["eth0"]
        started = time.monotonic()
        sender = subprocess.Popen([*cluster.inside(0), *command, f"import time; {send}"], **pipes)
        assert sender.stdout.readline() == "done\n"
        taken = time.monotonic() - started
        arrived = (counters(receiver.pid)["eth0"] - before).received
        # payload, 66 bytes of headers in each packet of at most 9000 bytes, and a few small ones
        assert size * 9000 / 8934 <= arrived <= size * 1.01 + 2000
        assert counters(sender.pid)["eth0"].sent == pytest.approx(arrived, abs=500)
        assert taken > 0.95 * 8 * size / 50e6
        assert cluster.dropped() == 0
        assert len(namespaces_of(os.getpid())) == (2 if num_nodes == 2 else num_nodes + 1)
    assert not namespaces_of(os.getpid())
    for process in (sender, receiver):
        assert process.wait(timeout=5) == -signal.SIGKILL


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import subprocess\n"
        "from benchmarks.cluster.emulation import emulated_cluster\n"
        "with emulated_cluster(2, 'none') as cluster:\n"
        f"    subprocess.Popen([*cluster.inside(1), sys.executable, '-c', {SLEEP!r}])\n"
        "    print('ready', flush=True)\n"
        "    input()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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
    with pytest.raises(ZeroDivisionError), emulated_cluster(3, "none"):
        _ = 1 / 0
    assert not namespaces_of(os.getpid())


@needs_namespaces
def test_what_the_system_refuses_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(emulation, "MTU", 10)  # less than any link may have
    with pytest.raises(InputError, match="could not be made: ip link add.*--one-host"):
        with emulated_cluster(2, "none"):
            pass
    assert not namespaces_of(os.getpid())


def test_a_dead_rank_is_named_and_the_others_end():
    host = Host(variables={"MASTER_ADDR": "127.0.0.1"})
    with started_crew(1, 2, lambda node: host) as crew:
        processes = [worker.process for worker in crew.workers]
        processes[1].kill()
        with pytest.raises(RankFailed, match="rank 1 died: killed by SIGKILL"):
            crew.ask("join", products="bf16")
    assert all(process.poll() == -signal.SIGKILL for process in processes)


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.cluster.crew.ORDER_SECONDS", 0.2)
    with started_crew(1, 1, lambda node: Host(variables={})) as crew:
        assert isinstance(crew, Crew)
        os.killpg(crew.workers[0].process.pid, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="rank 0 has not answered to 'join' in 0.2 s: it runs"):
            crew.ask("join", products="bf16")
