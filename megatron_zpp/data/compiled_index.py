"""The compiled loops of csrc/index/, where they were built; elsewhere NumPy does their work."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np

from zeropp.native.library import ADDRESS, INT, LibraryError, load

FOLDER = Path(__file__).parent
FUNCTIONS = MappingProxyType({
    # data, its size, key and position of the random state
    "zpp_index_shuffle": (ADDRESS, INT, ADDRESS, ADDRESS),
    # lengths, documents, number of documents, sequence length, rows, out, whether out is int64
    "zpp_index_starts": (ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT),
    # shares, limits, number of datasets, size, dataset, sample
    "zpp_index_blend": (ADDRESS, ADDRESS, INT, INT, ADDRESS, ADDRESS),
})  # fmt: skip
MAX_SHUFFLED = 1 << 31  # above it partners of a shuffle would need more than 32 bits

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class NativeIndex:
    """The functions of the library; all arrays are contiguous."""

    library: ctypes.CDLL

    def shuffle(self, data: np.ndarray, random: np.random.RandomState) -> None:
        """`random.shuffle(data)` for data of 4-byte elements [n], in place; the same order."""
        assert data.itemsize == 4 and data.flags.c_contiguous and len(data) <= MAX_SHUFFLED
        name, key, position, *normal = random.get_state()
        key, moved = np.ascontiguousarray(key, dtype=np.uint32).copy(), ctypes.c_int32(position)
        self.library.zpp_index_shuffle(
            data.ctypes.data, len(data), key.ctypes.data, ctypes.byref(moved)
        )
        random.set_state((name, key, moved.value, *normal))

    def starts(
        self, lengths: np.ndarray, document: np.ndarray, seq_length: int, out: np.ndarray
    ) -> None:
        """Fill `out` [n + 1, 2], int32 or int64, with the places of every seq_length-th token.

        `lengths` int32 [sequences], `document` int32 [E * docs] of numbers below `len(lengths)`.
        """
        lengths = np.require(lengths, np.int32, ["C", "A"])  # in a mapped .idx it is not aligned
        document = np.ascontiguousarray(document, dtype=np.int32)
        self.library.zpp_index_starts(
            *(lengths.ctypes.data, document.ctypes.data, len(document), seq_length),
            *(len(out), out.ctypes.data, out.itemsize == 8),
        )

    def blend(
        self, shares: np.ndarray, size: int, limits: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Dataset int16 [size] and its sample int64 [size]; see `blend.blend_index`.

        `shares` float64 [n] add up to 1; a dataset drops out after `limits` int64 [n] samples.
        """
        dataset, sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
        shares = np.ascontiguousarray(shares, dtype=np.float64)
        limits = None if limits is None else np.ascontiguousarray(limits, dtype=np.int64)
        self.library.zpp_index_blend(
            *(shares.ctypes.data, None if limits is None else limits.ctypes.data, len(shares)),
            *(size, dataset.ctypes.data, sample.ctypes.data),
        )
        return dataset, sample


@cache
def native() -> NativeIndex | None:
    """The compiled loops, or `None` if there are none to use; says so once, at INFO."""
    try:
        return NativeIndex(library=load(FOLDER, "_index", FUNCTIONS))
    except LibraryError as error:
        log.info("sample indices are built by NumPy, which takes longer: %s", error)
        return None
