"""The compiled loops of csrc/index.cpp, where they were built; NumPy does their work elsewhere."""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
STEM = "_index"
VERSION = 1  # csrc/index.cpp has the same: raised with every change of what passes between the two
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
    """The compiled loops, or None where there are none that fit; says so once, at INFO."""
    built = [FOLDER / (STEM + suffix) for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.exists()), None)
    if found is None:
        why = "csrc/ was not built here (no compiler, or not installed with pip or make setup)"
    elif (loops := _load(found)) is None:
        why = f"{found} was built from other sources; install again (make setup)"
    else:
        return loops
    log.info("sample indices are built by NumPy, which takes longer: %s", why)
    return None


def _load(path: Path) -> NativeIndex | None:
    library = ctypes.CDLL(str(path))
    number, address = ctypes.c_int64, ctypes.c_void_p
    arguments = {
        "zpp_index_version": (),
        "zpp_index_shuffle": (address, number, address, address),
        "zpp_index_starts": (address, address, number, number, number, address, number),
        "zpp_index_blend": (address, address, number, number, address, address),
    }
    if not all(hasattr(library, name) for name in arguments):
        return None
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = number if name == "zpp_index_version" else None
    return NativeIndex(library=library) if library.zpp_index_version() == VERSION else None
