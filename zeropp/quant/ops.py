"""The quantization ops of PyTorch: schema, shape rule, and what runs on which device.

`torch.ops.zeropp.quantize` and its three companions have the plain-torch reference on every device,
and on CPUs and GPUs the kernels of csrc/ where they were built. A layout travels as its three
fields.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeropp.quant import cpu as native
from zeropp.quant import cuda, reference
from zeropp.quant.packing import FLOATS, Layout, layout_of

NAMESPACE = "zeropp"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
SCHEMAS = (
    "quantize(Tensor rows, int[] sizes, int[] bits, ScalarType wire, int fold) -> Tensor",
    "dequantize(Tensor packed, Tensor(a!) out, int[] sizes, int[] bits, ScalarType wire, int fold)"
    " -> ()",
    "reduce_quantize(Tensor packed, int[] sizes, int[] bits, ScalarType wire, int[] onto_bits, "
    "ScalarType onto_wire, int terms) -> Tensor",
    "reduce_dequantize(Tensor packed, Tensor(a!) out, int[] sizes, int[] bits, ScalarType wire)"
    " -> ()",
)
Ints = Sequence[int]


class Backend(Protocol):
    """What runs the four ops on checked tensors: zeropp/quant/reference.py, or a `Kernels`."""

    def quantize(self, rows: Tensor, layout: Layout, fold: int) -> Tensor: ...
    def dequantize(self, packed: Tensor, out: Tensor, layout: Layout, fold: int) -> None: ...
    def reduce_quantize(
        self, packed: Tensor, layout: Layout, onto: Layout, terms: int
    ) -> Tensor: ...
    def reduce_dequantize(self, packed: Tensor, out: Tensor, layout: Layout) -> None: ...


def anywhere() -> Backend:
    """The backend of every device that has no other."""
    return reference


def on_cpu() -> Backend:
    """The backend of the CPU."""
    return native.native() or reference


def on_cuda() -> Backend:
    """The backend of NVIDIA GPUs."""
    return cuda.cuda() or reference


def quantize_shape(rows: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, fold: int) -> Tensor:
    layout = layout_of(tuple(sizes), tuple(bits), wire)
    check_quantize(rows, layout, fold)
    return rows.new_empty((rows.shape[0], layout.packed_bytes), dtype=torch.uint8)


def dequantize_shape(
    packed: Tensor, out: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, fold: int
) -> None:
    check_dequantize(packed, out, layout_of(tuple(sizes), tuple(bits), wire), fold)


def reduce_quantize_shape(
    packed: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, onto_bits: Ints,
    onto_wire: torch.dtype, terms: int,
) -> Tensor:  # fmt: skip
    check_reduce_quantize(packed, layout_of(tuple(sizes), tuple(bits), wire), terms)
    onto = layout_of(tuple(sizes), tuple(onto_bits), onto_wire)
    return packed.new_empty((packed.shape[0] // terms, onto.packed_bytes))


def reduce_dequantize_shape(
    packed: Tensor, out: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype
) -> None:
    check_reduce_dequantize(packed, out, layout_of(tuple(sizes), tuple(bits), wire))


def check_quantize(rows: Tensor, layout: Layout, fold: int) -> None:
    _check_values("rows", rows, (None, layout.elements))
    _check_groups(rows.shape[0], fold, "fold")


def check_dequantize(packed: Tensor, out: Tensor, layout: Layout, fold: int) -> None:
    _check_packed(packed, layout)
    _check_values("out", out, (packed.shape[0], layout.elements))
    _check_pair(packed, out)
    _check_groups(packed.shape[0], fold, "fold")


def check_reduce_quantize(packed: Tensor, layout: Layout, terms: int) -> None:
    _check_packed(packed, layout)
    _check_groups(packed.shape[0], terms, "terms")


def check_reduce_dequantize(packed: Tensor, out: Tensor, layout: Layout) -> None:
    _check_packed(packed, layout)
    _check_values("out", out, (layout.elements,))
    _check_pair(packed, out)


def _check_values(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} is {tensor.dtype}; give bfloat16, float16 or float32")
    _check_layout(name, tensor, shape)


def _check_packed(packed: Tensor, layout: Layout) -> None:
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed is {packed.dtype}; give uint8, as quantize returns it")
    _check_layout("packed", packed, (None, layout.packed_bytes))


def _check_layout(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted in (None, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; its layout needs ({wanted})")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; give a contiguous tensor")


def _check_pair(packed: Tensor, out: Tensor) -> None:
    if packed.device != out.device:
        raise ValueError(f"packed is on {packed.device} and out on {out.device}; give one device")


def _check_groups(rows: int, groups: int, name: str) -> None:
    if groups < 1 or rows % groups:
        raise ValueError(f"{name} is {groups}; it must divide the {rows} rows")


def _implementations(backend: Callable[[], Backend]) -> dict[str, Callable]:
    """The four ops by name: arguments checked, then left to the backend."""

    def quantize(
        rows: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, fold: int
    ) -> Tensor:  # fmt: skip
        layout = layout_of(tuple(sizes), tuple(bits), wire)
        check_quantize(rows, layout, fold)
        return backend().quantize(rows, layout, fold)

    def dequantize(
        packed: Tensor, out: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, fold: int
    ) -> None:
        layout = layout_of(tuple(sizes), tuple(bits), wire)
        check_dequantize(packed, out, layout, fold)
        backend().dequantize(packed, out, layout, fold)

    def reduce_quantize(
        packed: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype, onto_bits: Ints,
        onto_wire: torch.dtype, terms: int,
    ) -> Tensor:  # fmt: skip
        layout = layout_of(tuple(sizes), tuple(bits), wire)
        onto = layout_of(tuple(sizes), tuple(onto_bits), onto_wire)
        check_reduce_quantize(packed, layout, terms)
        return backend().reduce_quantize(packed, layout, onto, terms)

    def reduce_dequantize(
        packed: Tensor, out: Tensor, sizes: Ints, bits: Ints, wire: torch.dtype
    ) -> None:
        layout = layout_of(tuple(sizes), tuple(bits), wire)
        check_reduce_dequantize(packed, out, layout)
        backend().reduce_dequantize(packed, out, layout)

    written = (quantize, dequantize, reduce_quantize, reduce_dequantize)
    return {function.__name__: function for function in written}


def _register() -> None:
    shapes = {
        "quantize": quantize_shape,
        "dequantize": dequantize_shape,
        "reduce_quantize": reduce_quantize_shape,
        "reduce_dequantize": reduce_dequantize_shape,
    }
    for schema in SCHEMAS:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, shape in shapes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=LIBRARY)
    backends = {"CompositeExplicitAutograd": anywhere, "CPU": on_cpu, "CUDA": on_cuda}
    for key, backend in backends.items():
        for name, function in _implementations(backend).items():
            LIBRARY.impl(name, function, key)


_register()
