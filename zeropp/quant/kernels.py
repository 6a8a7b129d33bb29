"""The ops as functions of a compiled library, which CPUs and GPUs have alike."""

import ctypes
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zeropp.native.kernels import CudaLibrary
from zeropp.quant.packing import FLOATS

Argument = Tensor | int | Sequence[int]  # a Sequence: a `RowLayout.table`


@dataclass(frozen=True)
class Kernels(ABC):
    """The same functions as zeropp/quant/reference.py.

    Tensors must be contiguous and of the layout's shapes, which zeropp/quant/ops.py checks.
    """

    library: ctypes.CDLL | CudaLibrary

    @abstractmethod
    def run(self, function: str, *arguments: Argument) -> None:
        """Call a function of the library with the addresses of tables and tensors, and numbers."""

    def quantize(self, rows: Tensor, packed: Tensor, layout: Sequence[int], fold: int) -> None:
        type_of_rows = FLOATS.index(rows.dtype)
        self.run("zpp_quantize", layout, rows, type_of_rows, packed, len(rows), fold)

    def requantize(self, rows: Tensor, held: Tensor, packed: Tensor, layout: Sequence[int]) -> None:
        type_of_rows = FLOATS.index(rows.dtype)
        self.run("zpp_requantize", layout, rows, type_of_rows, held, packed, len(rows))

    def dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int], fold: int) -> None:
        type_of_out = FLOATS.index(out.dtype)
        self.run("zpp_dequantize", layout, packed, out, type_of_out, len(packed), fold)

    def reduce_quantize(
        self,
        packed: Tensor,
        reduced: Tensor,
        layout: Sequence[int],
        layout_out: Sequence[int],
        terms: int,
    ) -> None:
        self.run("zpp_reduce_quantize", layout, packed, layout_out, reduced, len(reduced), terms)

    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Sequence[int]) -> None:
        type_of_out = FLOATS.index(out.dtype)
        self.run("zpp_reduce_dequantize", layout, packed, out, type_of_out, len(packed))


def tables_in(arguments: Sequence[Argument]) -> list[array | Tensor | int]:
    """Return the arguments with layouts as memory, to be kept for as long as it is used."""
    return [array("q", each) if isinstance(each, Sequence) else each for each in arguments]
