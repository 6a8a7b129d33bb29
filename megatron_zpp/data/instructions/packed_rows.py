"""Examples of different lengths in rows of one length, as few as best-fit decreasing finds.

The longest comes first, each goes where it leaves least space, and the order of equals is kept: the
same lengths give the same rows, at most 11/9 of the fewest that there can be, and 4 (Johnson and
others, 1974, Worst-case performance bounds for simple one-dimensional packing algorithms).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """For each row of `capacity` tokens the numbers of its examples, of `lengths` int64 [n]."""
    assert not len(lengths) or 0 < lengths.min() <= lengths.max() <= capacity
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # rows with so much space
    spaces: list[int] = []  # those that any row has, sorted
    for example in np.argsort(-lengths, kind="stable").tolist():
        length, space, row = int(lengths[example]), capacity, len(rows)
        place = bisect_left(spaces, length)
        if place == len(spaces):
            rows.append([])
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[place]
        rows[row].append(example)
        left = space - length
        if left:
            same = by_space.setdefault(left, [])
            if not same:
                insort(spaces, left)
            same.append(row)
    return rows
