"""Ranks that die or do not answer are named."""

import os
import signal
import socket

import pytest

from benchmarks.cluster.rank_processes import RankFailed, started_ranks


def test_a_dead_rank_is_named_and_the_others_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # rank 0 waits for the other
    with started_ranks([[]], 2, meeting) as ranks:
        processes = [process.popen for process in ranks.processes]
        processes[1].kill()
        with pytest.raises(RankFailed, match="rank 1 died: killed by SIGKILL"):
            ranks.ask("join", products="bf16")
    assert all(process.poll() == -signal.SIGKILL for process in processes)


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.cluster.rank_processes.ORDER_SECONDS", 0.2)
    with started_ranks([[]], 1, {}) as ranks:
        os.killpg(ranks.processes[0].popen.pid, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="rank 0 has not answered to 'join' in 0.2 s: it runs"):
            ranks.ask("join", products="bf16")
