"""The compiled libraries of csrc/, one for CPUs and one for GPUs: found, checked, declared, called.

They are plain C to the outside, so that they build in seconds and fit any torch. ctypes lets go of
the interpreter's lock during a call. Where and how a function runs follows in its last arguments.
Both have the four ops of quantization; others, such as Adam, a library may have or not.
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from zeropp.quant.packing import BLOCK, Layout

FOLDER = Path(__file__).parent
VERSION = 2  # csrc/format.h has the same: raised with every change of what passes between the two
NUMBER, ADDRESS = ctypes.c_int64, ctypes.c_void_p
_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # csrc/format.h numbers them so
_FIELDS = ("start", "size", "bits", "scales_at", "data_at")


class _Layout(ctypes.Structure):
    _fields_ = (
        ("segments", ADDRESS), ("count", NUMBER), ("elements", NUMBER), ("packed_bytes", NUMBER),
        ("wire", NUMBER),
    )  # fmt: skip


_LAYOUT = ctypes.POINTER(_Layout)
_OPS = (
    ("zpp_quantize", (_LAYOUT, ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER)),
    ("zpp_dequantize", (_LAYOUT, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER)),
    ("zpp_reduce_quantize", (_LAYOUT, ADDRESS, _LAYOUT, ADDRESS, NUMBER, NUMBER)),
    ("zpp_reduce_dequantize", (_LAYOUT, ADDRESS, ADDRESS, NUMBER, NUMBER)),
)
_OPTIONAL = (("zpp_adam", (ADDRESS,)),)  # zeropp/optim/adam_op.py
_FACTS = (("zpp_version", ()), ("zpp_block", (NUMBER,)))


@dataclass(frozen=True, kw_only=True)
class Kernels(ABC):
    """The ops of a library. Tensors must be contiguous, on its device, and of the layout's shapes:
    zeropp/quant/ops.py has checked them."""

    library: ctypes.CDLL

    @abstractmethod
    def run(self, name: str, device: torch.device, *arguments: object) -> None:
        """Run the library's `zpp_<name>` on a device."""

    def call(self, name: str, packed: Tensor, *arguments: object) -> None:
        """Run the library's `zpp_<name>` where `packed` is."""
        self.run(name, packed.device, *arguments)

    def has(self, name: str) -> bool:
        """Whether the library has `zpp_<name>`."""
        return hasattr(self.library, f"zpp_{name}")

    def quantize(self, rows: Tensor, layout: Layout, fold: int) -> Tensor:
        """As `reference.quantize`."""
        packed = rows.new_empty((rows.shape[0], layout.packed_bytes), dtype=torch.uint8)
        self.quantize_into(rows, packed, layout, fold)
        return packed

    def quantize_into(self, rows: Tensor, packed: Tensor, layout: Layout, fold: int) -> None:
        """`quantize` into memory that is there."""
        self.call(
            "quantize", packed, _described(layout), rows.data_ptr(), _TYPES.index(rows.dtype),
            packed.data_ptr(), rows.shape[0], fold,
        )  # fmt: skip

    def dequantize(self, packed: Tensor, out: Tensor, layout: Layout, fold: int) -> None:
        """As `reference.dequantize`."""
        self.call(
            "dequantize", packed, _described(layout), packed.data_ptr(), out.data_ptr(),
            _TYPES.index(out.dtype), packed.shape[0], fold,
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
        self.call(
            "reduce_quantize", packed, _described(layout), packed.data_ptr(), _described(onto),
            reduced.data_ptr(), rows, packed.shape[0] // rows if rows else 0,
        )  # fmt: skip

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Layout) -> None:
        """As `reference.reduce_dequantize`."""
        if not packed.shape[0]:
            out.zero_()  # the sum of no terms
            return
        self.call(
            "reduce_dequantize", packed, _described(layout), packed.data_ptr(), out.data_ptr(),
            _TYPES.index(out.dtype), packed.shape[0],
        )  # fmt: skip


def find(stem: str) -> Path | None:
    """The library of that name that was built here, if one was."""
    built = [FOLDER / (stem + suffix) for suffix in EXTENSION_SUFFIXES]
    return next((path for path in built if path.exists()), None)


def load(
    path: Path, where: tuple[type, ...], returned: type | None, facts: tuple = ()
) -> ctypes.CDLL | None:
    """The library at `path`, declared, or `None` if it was built from other sources.

    where: the types of the arguments that end an op's, `returned` that of its result. facts: names
    and argument types of further functions, which return an int64. It need not have the ops that
    came after the first four: see `Kernels.has`.
    """
    library = ctypes.CDLL(str(path))
    more = [one for one in _OPTIONAL if hasattr(library, one[0])]
    ops = [(name, (*types, *where), returned) for name, types in (*_OPS, *more)]
    known = [(name, types, NUMBER) for name, types in (*_FACTS, *facts)]
    for name, types, result in (*ops, *known):
        if not hasattr(library, name):
            return None
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    same = library.zpp_version() == VERSION
    same = same and all(library.zpp_block(bits) == block for bits, block in BLOCK.items())
    return library if same else None


@lru_cache(maxsize=4096)
def _described(layout: Layout) -> _Layout:
    """A layout as csrc/format.h reads it."""
    numbers = [getattr(one, field) for one in layout.segments for field in _FIELDS]
    table = (ctypes.c_int64 * len(numbers))(*numbers)
    described = _Layout(
        segments=ctypes.addressof(table), count=len(layout.segments), elements=layout.elements,
        packed_bytes=layout.packed_bytes, wire=_TYPES.index(layout.wire),
    )  # fmt: skip
    described.table = table  # keeps the numbers alive
    return described
