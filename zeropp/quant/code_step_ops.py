"""Steps of INT8 codes as ops of PyTorch: what a weight's owner sends to those who hold its codes.

zeropp/quant/code_steps.py defines the message, zeropp/quant/code_step_reference.py the arithmetic,
which runs on every device; CPUs and NVIDIA GPUs have kernels, those of csrc/code_steps/. Shapes: K
rows, C elements of a row, P bytes of a packed row, S bytes of a message. Neither function is
differentiable.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from zeropp.quant import code_step_reference as reference
from zeropp.quant import cpu, cuda
from zeropp.quant.code_steps import StepLayout, message_bytes
from zeropp.quant.ops import LIBRARY, NAMESPACE
from zeropp.quant.packing import ELEMENTS, FLOATS, PACKED_BYTES

Table = Sequence[int]  # a `StepLayout.table`
SCHEMAS = (
    "code_steps(Tensor rows, Tensor packed, int[] layout) -> Tensor",
    "apply_code_steps(Tensor messages, Tensor(a!) packed, int[] layout) -> ()",
)


def code_steps(rows: Tensor, packed: Tensor, layout: StepLayout) -> Tensor:
    """Return messages, uint8 (K, S), that move `packed` (K, P) towards `rows` (K, C).

    `rows` are bf16, fp16 or fp32. A code moves by at most `layout.reach`; applied again and again,
    messages bring all codes to where they belong. Raises TypeError for another dtype, and
    ValueError for a shape that is not the layout's, for tensors that are not contiguous and for
    those on different devices.
    """
    return torch.ops.zeropp.code_steps.default(rows, packed, layout.table)


def apply_code_steps(messages: Tensor, packed: Tensor, layout: StepLayout) -> None:
    """Move the codes of `packed` (K, P) by the steps of `messages` (K, S), in place.

    Raises as `code_steps` does.
    """
    torch.ops.zeropp.apply_code_steps.default(messages, packed, layout.table)


class StepBackend(Protocol):
    """Runs the ops on tensors that have been checked; fills memory that it is given."""

    def code_steps(self, rows: Tensor, packed: Tensor, messages: Tensor, layout: Table) -> None: ...
    def apply_code_steps(self, messages: Tensor, packed: Tensor, layout: Table) -> None: ...


class _FakeBackend:
    """The backend of fake tensors, which have shapes but no data."""

    def code_steps(self, *arguments: object) -> None:
        """Do nothing."""

    apply_code_steps = code_steps


def _kernels_of(device: ModuleType) -> Callable[[], StepBackend]:
    def backend() -> StepBackend:
        kernels = device.backend()
        return reference if isinstance(kernels, ModuleType) else kernels

    return backend


def _implementations(backend: Callable[[], StepBackend]) -> dict[str, Callable]:
    """The ops by name: check the arguments, allocate the result, call the backend."""

    def code_steps(rows: Tensor, packed: Tensor, layout: Table) -> Tensor:
        _require(rows, "rows", layout[ELEMENTS], FLOATS)
        _require(packed, "packed", layout[PACKED_BYTES], (torch.uint8,), rows)
        messages = packed.new_empty((len(rows), message_bytes(layout)))
        backend().code_steps(rows, packed, messages, layout)
        return messages

    def apply_code_steps(messages: Tensor, packed: Tensor, layout: Table) -> None:
        _require(messages, "messages", message_bytes(layout), (torch.uint8,))
        _require(packed, "packed", layout[PACKED_BYTES], (torch.uint8,), messages)
        backend().apply_code_steps(messages, packed, layout)

    return {function.__name__: function for function in (code_steps, apply_code_steps)}


def _require(
    tensor: Tensor, name: str, size: int, dtypes: Sequence[torch.dtype], other: Tensor | None = None
) -> None:
    """Raise unless a tensor is of the layout, with as many rows as `other` and on its device."""
    rows = None if other is None else len(other)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; give {' or '.join(map(str, dtypes))}")
    fits = tensor.dim() == 2 and tensor.shape[1] == size
    if not fits or rows not in (None, len(tensor)):
        count = "any" if rows is None else rows
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; its layout needs ({count}, {size})"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; give a contiguous tensor")
    if other is not None and tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}, other arguments on {other.device}; give one device"
        )


def _register() -> None:
    for schema in SCHEMAS:
        LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for name, function in _implementations(_FakeBackend).items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", function, lib=LIBRARY)
    backends = {
        "CompositeExplicitAutograd": lambda: reference,
        "CPU": _kernels_of(cpu),
        "CUDA": _kernels_of(cuda),
    }
    for key, backend in backends.items():
        for name, function in _implementations(backend).items():
            LIBRARY.impl(name, function, key)


_register()
