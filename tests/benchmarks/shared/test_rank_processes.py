"""Ranks that die or do not answer are named."""

import os
import signal

import pytest

from benchmarks.cluster.cluster_rank import ClusterRank
from benchmarks.shared.rank_processes import RankFailed, started_ranks


def test_a_dead_rank_is_named_and_the_others_end():
    with started_ranks(ClusterRank, 2) as ranks:  # rank 0 waits for the other
        processes = [process.popen for process in ranks.processes]
        processes[1].kill()
        with pytest.raises(RankFailed, match="rank 1 died: killed by SIGKILL"):
            ranks.ask("join", products="bf16")
    assert all(process.poll() == -signal.SIGKILL for process in processes)


def test_a_silent_rank_is_named():
    with started_ranks(ClusterRank, 1, seconds=0.2) as ranks:
        os.killpg(ranks.processes[0].popen.pid, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="rank 0 has not answered to 'join' in 0.2 s"):
            ranks.ask("join", products="bf16")
