"""The compiled loops of csrc/index/, if they were built; otherwise Python and NumPy do the work."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np

from zeropp.native import ADDRESS, INT, LibraryError, load

FOLDER = Path(__file__).parent
FUNCTIONS = MappingProxyType(
    {
        # data, its size, key and position of the random state
        "zpp_index_shuffle": (ADDRESS, INT, ADDRESS, ADDRESS),
        # lengths, documents, number of documents, sequence length, rows, out, whether out is int64
        "zpp_index_starts": (ADDRESS, ADDRESS, INT, INT, INT, ADDRESS, INT),
        # shares, limits, number of datasets, size, dataset, sample
        "zpp_index_blend": (ADDRESS, ADDRESS, INT, INT, ADDRESS, ADDRESS),
    }
)
MAX_SHUFFLED = 1 << 31  # a longer array would need more than 32 random bits for each swap

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class NativeIndex:
    """The functions of the library."""

    library: ctypes.CDLL

    def shuffle(self, array: np.ndarray, random: np.random.RandomState) -> None:
        """Shuffle a contiguous array [n] of 4-byte elements in place, as `random.shuffle` does."""
        assert array.itemsize == 4 and array.flags.c_contiguous and len(array) <= MAX_SHUFFLED
        name, key, position, *gauss_state = random.get_state()
        key = np.ascontiguousarray(key, dtype=np.uint32).copy()
        new_position = ctypes.c_int32(position)
        self.library.zpp_index_shuffle(
            array.ctypes.data, len(array), key.ctypes.data, ctypes.byref(new_position)
        )
        random.set_state((name, key, new_position.value, *gauss_state))

    def sample_starts(
        self, lengths: np.ndarray, document: np.ndarray, seq_length: int, out: np.ndarray
    ) -> None:
        """Fill `out` [n + 1, 2], int32 or int64, with the start of each sample.

        lengths: int32 [sequences]. document: int32 [E * docs], indices of `lengths`. A row of `out`
        is an index of `document` and a token in that sequence; see `sample_index.sample_starts`.
        """
        lengths = np.require(lengths, np.int32, ["C", "A"])  # not aligned in a mapped .idx file
        document = np.ascontiguousarray(document, dtype=np.int32)
        self.library.zpp_index_starts(
            *(lengths.ctypes.data, document.ctypes.data, len(document), seq_length),
            *(len(out), out.ctypes.data, out.itemsize == 8),
        )

    def blend(
        self, shares: np.ndarray, size: int, limits: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset int16 [size] and its sample int64 [size]; see `blend.blend_index`.

        shares: float64 [n], which add up to 1. limits: int64 [n], the number of samples after which
        each dataset is exhausted.
        """
        dataset, sample = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
        shares = np.ascontiguousarray(shares, dtype=np.float64)
        limits_address = None
        if limits is not None:
            limits = np.ascontiguousarray(limits, dtype=np.int64)
            limits_address = limits.ctypes.data
        self.library.zpp_index_blend(
            *(shares.ctypes.data, limits_address, len(shares)),
            *(size, dataset.ctypes.data, sample.ctypes.data),
        )
        return dataset, sample


@cache
def native_index() -> NativeIndex | None:
    """Return the compiled loops, or None if they cannot be used, which is logged once."""
    try:
        return NativeIndex(library=load(FOLDER, "_index", FUNCTIONS))
    except LibraryError as error:
        log.info("sample indices are built by NumPy and Python, which takes longer: %s", error)
        return None
