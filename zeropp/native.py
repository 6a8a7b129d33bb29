"""The compiled kernels of csrc/, where they were built: found, checked and declared for ctypes.

The library is plain C to the outside, so that it builds in seconds and fits any torch. ctypes lets
go of the interpreter's lock during a call.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from zeropp.packing import BLOCK, Layout

FOLDER = Path(__file__).parent
STEM = "_kernels"
VERSION = 1  # csrc/cpu.cpp has the same: raised with every change of what passes between the two
ISAS = ("plain", "avx2", "avx512")
_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # csrc/kernels.h numbers them so
_FIELDS = ("start", "size", "bits", "scales_at", "data_at")
_log = logging.getLogger("zeropp")


class _Layout(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.c_void_p), ("count", ctypes.c_int64), ("elements", ctypes.c_int64),
        ("packed_bytes", ctypes.c_int64), ("wire", ctypes.c_int64),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Native:
    """The functions of the library. Tensors must be contiguous, on the CPU, and of the layout's
    shapes: zeropp/ops.py has checked them."""

    library: ctypes.CDLL

    def quantize(self, rows: Tensor, layout: Layout, fold: int) -> Tensor:
        """As `reference.quantize`."""
        packed = rows.new_empty((rows.shape[0], layout.packed_bytes), dtype=torch.uint8)
        self.quantize_into(rows, packed, layout, fold)
        return packed

    def quantize_into(self, rows: Tensor, packed: Tensor, layout: Layout, fold: int) -> None:
        """`quantize` into memory that is there."""
        self.library.zpp_quantize(
            _described(layout), rows.data_ptr(), _TYPES.index(rows.dtype), packed.data_ptr(),
            rows.shape[0], fold, torch.get_num_threads(),
        )  # fmt: skip

    def dequantize(self, packed: Tensor, out: Tensor, layout: Layout, fold: int) -> None:
        """As `reference.dequantize`."""
        self.library.zpp_dequantize(
            _described(layout), packed.data_ptr(), out.data_ptr(), _TYPES.index(out.dtype),
            packed.shape[0], fold, torch.get_num_threads(),
        )  # fmt: skip

    def reduce_quantize(self, packed: Tensor, layout: Layout, onto: Layout, terms: int) -> Tensor:
        """As `reference.reduce_quantize`."""
        reduced = packed.new_empty((packed.shape[0] // terms, onto.packed_bytes))
        self.reduce_quantize_into(packed, reduced, layout, onto)
        return reduced

    def reduce_quantize_into(
        self, packed: Tensor, reduced: Tensor, layout: Layout, onto: Layout
    ) -> None:
        """`reduce_quantize` into memory that is there; its rows say how many terms there are."""
        rows = reduced.shape[0]
        self.library.zpp_reduce_quantize(
            _described(layout), packed.data_ptr(), _described(onto), reduced.data_ptr(),
            rows, packed.shape[0] // rows if rows else 0, torch.get_num_threads(),
        )  # fmt: skip

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Layout) -> None:
        """As `reference.reduce_dequantize`."""
        if not packed.shape[0]:
            out.zero_()  # the sum of no terms
            return
        self.library.zpp_reduce_dequantize(
            _described(layout), packed.data_ptr(), out.data_ptr(), _TYPES.index(out.dtype),
            packed.shape[0], torch.get_num_threads(),
        )  # fmt: skip

    def use(self, isa: str | None) -> bool:
        """Hold on to an instruction set of `ISAS`; `None`: the best there is. For tests.

        Returns whether this processor has it; if not, nothing changes.
        """
        return bool(self.library.zpp_set_isa(-1 if isa is None else ISAS.index(isa)))


@cache
def native() -> Native | None:
    """The kernels, or `None` where there are none that fit these sources; says so once, at INFO."""
    built = [FOLDER / (STEM + suffix) for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in built if path.exists()), None)
    if found is None:
        why = "csrc/ was not built here (no compiler, or not installed with pip or make setup)"
    elif (kernels := _load(found)) is None:
        why = f"{found} was built from other sources; install again (make setup)"
    else:
        return kernels
    _log.info("quantization on the CPU runs in plain PyTorch, which is slow: %s", why)
    return None


def _load(path: Path) -> Native | None:
    library = ctypes.CDLL(str(path))
    number, address = ctypes.c_int64, ctypes.c_void_p
    layout = ctypes.POINTER(_Layout)
    arguments = {
        "zpp_version": (),
        "zpp_block": (number,),
        "zpp_set_isa": (number,),
        "zpp_quantize": (layout, address, number, address, number, number, number),
        "zpp_dequantize": (layout, address, address, number, number, number, number),
        "zpp_reduce_quantize": (layout, address, layout, address, number, number, number),
        "zpp_reduce_dequantize": (layout, address, address, number, number, number),
    }
    if not all(hasattr(library, name) for name in arguments):
        return None
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = number if name in ("zpp_version", "zpp_block", "zpp_set_isa") else None
    same = library.zpp_version() == VERSION
    same = same and all(library.zpp_block(bits) == block for bits, block in BLOCK.items())
    return Native(library=library) if same else None


@lru_cache(maxsize=4096)
def _described(layout: Layout) -> _Layout:
    """A layout as csrc/cpu.cpp reads it."""
    numbers = [getattr(one, field) for one in layout.segments for field in _FIELDS]
    table = (ctypes.c_int64 * len(numbers))(*numbers)
    described = _Layout(
        segments=ctypes.addressof(table), count=len(layout.segments), elements=layout.elements,
        packed_bytes=layout.packed_bytes, wire=_TYPES.index(layout.wire),
    )  # fmt: skip
    described.table = table  # keeps the numbers alive
    return described
