"""Pack examples of different lengths into rows of the same length, by best-fit decreasing.

The examples are placed in order of decreasing length, each into the row in which it leaves the
least space. The result is deterministic, and has at most 11/9 of the fewest possible rows, plus 4
(Johnson et al., 1974, Worst-case performance bounds for simple one-dimensional packing algorithms).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the numbers of the examples in each row.

    A row has space for `capacity` tokens; `lengths` int64 [n] are the tokens of the examples.
    """
    assert not len(lengths) or 0 < lengths.min() <= lengths.max() <= capacity
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}  # rows that have the same number of free tokens
    spaces: list[int] = []  # the keys of `rows_by_space`, sorted
    for example in np.argsort(-lengths, kind="stable").tolist():
        length, space, row = int(lengths[example]), capacity, len(rows)
        best = bisect_left(spaces, length)
        if best == len(spaces):
            rows.append([])
        else:
            space = spaces[best]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[best]
        rows[row].append(example)
        remaining = space - length
        if remaining:
            rows_with_remaining = rows_by_space.setdefault(remaining, [])
            if not rows_with_remaining:
                insort(spaces, remaining)
            rows_with_remaining.append(row)
    return rows
