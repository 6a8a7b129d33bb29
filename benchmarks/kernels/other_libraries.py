"""Other libraries' block quantization of the same numbers, if they are installed.

None of them computes the same as ours; `differs` says how. They are called in their own way;
torchao's functions, which are plain PyTorch, are compiled on GPUs.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from zeropp.quant.packing import BLOCK

NAMES = ("bitsandbytes", "torchao")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library's op beside one of ours."""

    name: str
    run: Callable[[], object]
    differs: str


def quantizers(values: Tensor, bits: int) -> Iterator[Peer]:
    """Quantize `values` (K, C) in the same blocks as ours, row after row."""
    block = BLOCK[bits]
    if library := _functional():
        if bits == 8:
            yield Peer(
                name="bitsandbytes.functional.quantize_blockwise",
                run=lambda: library.quantize_blockwise(values, blocksize=block),
                differs="codes from a table of 256 numbers that are not evenly spaced; fp32 scales",
            )
        else:
            yield Peer(
                name="bitsandbytes.functional.quantize_4bit",
                run=lambda: library.quantize_4bit(values, blocksize=block, quant_type="nf4"),
                differs="codes from a table (NF4); fp32 scales; rows stay in order",
            )
    if bits == 8 and (affine := _affine()):
        quantize = _compiled(_affine_quantize, values)
        yield Peer(
            name="torchao: choose_qparams_affine, quantize_affine",
            run=lambda: quantize(affine, values, block),
            differs="zero points; the largest magnitude sets a block's scale, not the extreme",
        )


def dequantizers(values: Tensor, bits: int) -> Iterator[Peer]:
    """Get `values` (K, C) back, in their dtype, from what the library's `quantizers` made."""
    block = BLOCK[bits]
    if library := _functional():
        if bits == 8:
            codes, state = library.quantize_blockwise(values, blocksize=block)
            run, name = library.dequantize_blockwise, "dequantize_blockwise"
        else:
            codes, state = library.quantize_4bit(values, blocksize=block, quant_type="nf4")
            run, name = library.dequantize_4bit, "dequantize_4bit"
        yield Peer(
            name=f"bitsandbytes.functional.{name}", run=lambda: run(codes, state),
            differs="codes stand for numbers of a table; fp32 scales",
        )  # fmt: skip
    if bits == 8 and (affine := _affine()):
        codes, scale, zero = _affine_quantize(affine, values, block)
        dequantize = _compiled(_affine_dequantize, values)
        yield Peer(
            name="torchao: dequantize_affine",
            run=lambda: dequantize(affine, codes, scale, zero, block, values.dtype),
            differs="zero points are subtracted",
        )


def versions() -> dict[str, str]:
    """The version of each library, or that it is not installed."""
    installed = {name for name in NAMES if importlib.util.find_spec(name)}
    return {
        name: importlib.metadata.version(name) if name in installed else "not installed"
        for name in NAMES
    }


def _functional() -> ModuleType | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    return importlib.import_module("bitsandbytes.functional")


def _affine() -> ModuleType | None:
    if importlib.util.find_spec("torchao") is None:
        return None
    return importlib.import_module("torchao.quantization.quant_primitives")


def _affine_quantize(library: ModuleType, values: Tensor, block: int) -> tuple[Tensor, ...]:
    scale, zero = library.choose_qparams_affine(
        values, library.MappingType.SYMMETRIC, (1, block), torch.int8, scale_dtype=torch.bfloat16
    )
    codes = library.quantize_affine(values, (1, block), scale, zero, torch.int8)
    return codes, scale, zero


def _affine_dequantize(
    library: ModuleType, codes: Tensor, scale: Tensor, zero: Tensor, block: int, dtype: torch.dtype
) -> Tensor:
    return library.dequantize_affine(codes, (1, block), scale, zero, torch.int8, output_dtype=dtype)


def _compiled(function: Callable, values: Tensor) -> Callable:
    return torch.compile(function, dynamic=False) if values.is_cuda else function
