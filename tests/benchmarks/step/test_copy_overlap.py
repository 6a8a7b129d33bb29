"""Copies count as hidden while kernels run."""

import pytest

from benchmarks.step.copy_overlap import overlapped_share, union


def test_the_share_of_the_copies_that_kernels_cover():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlapped_share([(0, 4), (2, 6)], [(1, 2), (5, 9)]) == pytest.approx(2 / 6)
    assert overlapped_share([(0, 1)], []) == 0.0 and overlapped_share([], [(0, 1)]) == 1.0
