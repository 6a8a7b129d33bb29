"""Shards that are stored quantized, gathered as they are stored, and computed with as numbers.

    shard (n,) of a frozen matrix -> quantized once -> packed codes and scales (P,), in its place
    gather: packed rows of all ranks (W, P) -> numbers (W, n) in the compute format, on arrival

A rank's shard takes P bytes for n elements: codes, and a bf16 scale for each block of 256 (INT8)
or 128 (INT4) of them; no block crosses a shard.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from zeropp import fsdp_adapter as fsdp
from zeropp.errors import InputError
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import FLOATS, RowLayout, row_layout

_KEPT = (  # ops whose result is stored in the same way
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
)


class QuantizedShard(Tensor):
    """One rank's shard of a weight: to whoever reads it numbers of `dtype`, in memory codes.

    packed: uint8 (P,), as `packing` says; it has one segment, the shard padded as all ranks' are.
    Reading, also a part, makes numbers anew each time. Copying into the whole of it quantizes; any
    other write raises InputError, which names the `setting` that asks for codes.
    """

    setting: ClassVar[str]

    @staticmethod
    def __new__(
        cls, packed: Tensor, layout: RowLayout, shape: torch.Size, dtype: torch.dtype
    ) -> "QuantizedShard":
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)

    def __init__(
        self, packed: Tensor, layout: RowLayout, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self.packed, self.packing = packed, layout

    @classmethod
    def of(cls, values: Tensor, elements: int, bits: int) -> "QuantizedShard":
        """Quantize a contiguous shard, padded with zeros to `elements`."""
        layout = stored_layout(elements, bits)
        return cls(_packed(values, layout), layout, values.shape, values.dtype)

    @classmethod
    def zeros(
        cls, like: Tensor, elements: int, bits: int, device: torch.device
    ) -> "QuantizedShard":
        """Memory for a shard of the shape and dtype of `like`; values are to be copied into it."""
        layout = stored_layout(elements, bits)
        packed = torch.zeros(layout.packed_bytes, dtype=torch.uint8, device=device)
        return cls(packed, layout, like.shape, like.dtype)

    def numbers(self) -> Tensor:
        """The shard, dequantized into its dtype; fresh memory."""
        row = torch.empty(1, self.packing.elements, dtype=self.dtype, device=self.device)
        dequantize(self.packed.view(1, -1), row, self.packing)
        return row.view(-1)[: self.numel()].view(self.shape)

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the codes: FSDP2 asks whether its shard is still the one it knows."""
        return self.packed.untyped_storage()

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], None]:
        """What FSDP2 gathers of this shard: the codes."""
        return (self.packed,), None

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[Tensor],
        metadata: None,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """All ranks' codes (W*P,) as numbers (W*n,) in `dtype`: fresh memory, or that of `out`."""
        rows = gathered[0].view(-1, self.packing.packed_bytes)
        size = len(rows) * self.packing.elements
        if out is None:
            whole = torch.empty(size, dtype=dtype, device=rows.device)
            dequantize(rows, whole.view(len(rows), -1), self.packing)
            return whole, (whole,)
        if isinstance(out, DTensor):  # on another axis
            out = out._local_tensor
        whole = torch.empty(0, dtype=dtype, device=rows.device)
        whole.set_(out.untyped_storage(), 0, (size,), (1,))
        dequantize(rows, whole.view(len(rows), -1), self.packing)
        return None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KEPT:
            return _same(args[0], func(args[0].packed, *args[1:], **kwargs))
        if func is torch.ops.aten.view.default and tuple(args[1]) == args[0].shape:
            return _same(args[0], args[0].packed)  # DTensor.to_local
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            values = _numbers(args[1]).to(device=args[0].device, dtype=args[0].dtype)
            args[0].packed.copy_(_packed(values, args[0].packing))
            return args[0]
        arguments = _written_arguments(func, args)
        written = next((value for value in arguments if isinstance(value, cls)), None)
        if written is not None:
            raise InputError(
                f"{func.__name__} would change a frozen weight of shape {list(written.shape)} that "
                "is stored quantized: only whole weights can be copied into it; to train it, leave "
                f"{written.setting} out"
            )
        return func(*pytree.tree_map(_numbers, args), **pytree.tree_map(_numbers, kwargs))

    __torch_function__ = torch._C._disabled_torch_function_impl


def stored_layout(elements: int, bits: int) -> RowLayout:
    """Return the memory layout of a shard padded to `elements` elements."""
    return row_layout((elements,), (bits,), torch.bfloat16)


def stored_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of this rank's quantized shards, and elements of them."""
    shards = [
        parameter._local_tensor for parameter in model.parameters() if is_quantized(parameter)
    ]
    return sum(shard.packed.nbytes for shard in shards), sum(shard.numel() for shard in shards)


def require_frozen(model: nn.Module) -> None:
    """Raise InputError naming a weight that is stored quantized and was made trainable."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and is_quantized(parameter):
            raise InputError(
                f"{name} requires gradients, and it is stored quantized, so no step could change "
                "it: leave it frozen (requires_grad_(False)), or leave "
                f"{parameter._local_tensor.setting} out"
            )


def is_quantized(parameter: Tensor) -> bool:
    """Whether this rank's part of a parameter is stored quantized."""
    return isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, QuantizedShard)


def as_numbers(parameter: DTensor) -> DTensor:
    """Return a parameter as numbers, if it is stored quantized, or as it is."""
    if not is_quantized(parameter):
        return parameter
    return fsdp.shard_like(parameter, parameter._local_tensor.numbers())


def _packed(values: Tensor, layout: RowLayout) -> Tensor:
    """(P,) of a shard that may be shorter than its layout."""
    row = values.reshape(1, -1)
    if row.dtype not in FLOATS:
        row = row.float()
    if row.shape[1] < layout.elements:
        row = torch.nn.functional.pad(row, (0, layout.elements - row.shape[1]))
    return quantize(row.contiguous(), layout).view(-1)


def _same(shard: QuantizedShard, packed: Tensor) -> QuantizedShard:
    return type(shard)(packed, shard.packing, shard.shape, shard.dtype)


def _numbers(value: Any) -> Any:
    return value.numbers() if isinstance(value, QuantizedShard) else value


def _written_arguments(func: Any, args: Sequence[Any]) -> Iterator[Any]:
    """Yield the arguments that an op writes to."""
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from value if isinstance(value, list | tuple) else (value,)
