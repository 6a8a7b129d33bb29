"""Packing: everything once, nothing too full, the same each time, few rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.instructions.packed_rows import pack


@given(st.lists(st.integers(1, 20), max_size=80))
def test_each_example_once_and_no_row_too_full(lengths: list[int]) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(filled) and max(filled, default=0) <= 20
    # Any fit: two rows of which each is at most half full would have been one.
    assert sum(2 * length <= 20 for length in filled) <= 1
    fewest = -(-sum(lengths) // 20)
    assert len(rows) <= max(2 * fewest - 1, 0)
    assert pack(np.array(lengths, dtype=np.int64), 20) == rows


def test_the_space_that_fits_best() -> None:
    """7 and 6 open rows with spaces 3 and 4 of 10; the 4 goes to the 6, the 3 to the 7."""
    assert pack(np.array([3, 6, 7, 4]), 10) == [[2, 0], [1, 3]]
    assert pack(np.array([10, 10]), 10) == [[0], [1]]
