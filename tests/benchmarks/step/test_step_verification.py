"""Loops that train differently are not timed."""

import math

import pytest

from benchmarks.shared.interleaved import Disagreement
from benchmarks.step.step_verification import largest_differences, require_agreement, tolerances

REFERENCE = [(6.0, 1.0), (5.9, 0.9)]


def test_equal_histories_agree() -> None:
    differences = largest_differences(REFERENCE, REFERENCE)
    assert differences == {"loss": 0, "gradient norm": 0}
    require_agreement("peer", "ours", differences, tolerances("bf16", 1))


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([(6.0, 1.0), (5.88, 0.9)], "peer and ours do not train alike: loss differs"),
        ([(6.0, 1.01), (5.9, 0.9)], "gradient norm differs"),
        ([(math.nan, 1.0), (5.9, 0.9)], "loss differs by nan"),
        ([(6.0, 1.0), (math.nan, 0.9)], "loss differs by nan"),
    ],
)
def test_different_histories_do_not(history: list[tuple[float, float]], message: str) -> None:
    differences = largest_differences(history, REFERENCE)
    with pytest.raises(Disagreement, match=message):
        require_agreement("peer", "ours", differences, tolerances("bf16", 1))
