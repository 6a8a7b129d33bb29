"""Passes on meta tensors, whose memory is that of passes on a CPU."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_zpp.planner.parts.meta_model import META

CPU = torch.device("cpu")


class AsOnCpus(TorchDispatchMode):
    """Lets ops on META allocate what they do on a CPU, and computes integers there.

    Integers have values where no other tensor takes part: they decide how many rows go where.
    """

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        num_without_values = sum(tensor.is_meta for tensor in tensors)
        if not num_without_values and (tensors or _makes_integers(func, options)):
            if options.get("device") is not None:
                options["device"] = CPU
            with _disable_current_modes():
                return func(*args, **options)
        if func in _ELEMENTWISE and all(map(Tensor.is_contiguous, tensors)):
            return _elementwise(*args)
        if func in _ALLOCATING_OTHERWISE:
            return _ALLOCATING_OTHERWISE[func](*args, **options)
        if num_without_values < len(tensors):
            args, options = tree_map_only(Tensor, _without_values, (args, options))
        return func(*args, **options)


class AttentionOfCpus(TorchFunctionMode):
    """Lets PyTorch choose kernels of attention as on a CPU: on META it would save all scores."""

    def __torch_function__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        attends = func is F.scaled_dot_product_attention
        return (_attend if attends else func)(*args, **(kwargs or {}))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Map q [B, N, R, D] to [B, N, R, V], by the kernel that PyTorch chooses on a CPU."""
    with _disable_current_modes():  # stand-ins, of the memory of a row of the last dim
        stand_ins = tree_map_only(
            Tensor,
            lambda each: torch.empty(each.shape[-1], dtype=each.dtype).expand(each.shape),
            (q, k, v, attn_mask),
        )
        options = {"scale": scale, "enable_gqa": enable_gqa}
        choice = torch._fused_sdp_choice(*stand_ins, dropout_p, is_causal, **options)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)


def run_backward(result: Tensor, gradient: Tensor) -> None:
    """Run a backward pass in which recomputed attention is that of CPUs, too.

    PyTorch's `backward` leaves the modes of functions before it begins.
    """
    inputs = ()  # all of them
    _engine_run_backward(
        (result,), (gradient,), False, False, inputs, allow_unreachable=True, accumulate_grad=True
    )


def _grouped_product(
    first: Tensor, second: Tensor, ends: Tensor, *_: object, **__: object
) -> Tensor:
    """Return a tensor of the size of a grouped product, which PyTorch allocates for bf16 alone."""
    shape = (len(first), second.shape[-1])
    if second.ndim == 2:  # of rows and their gradients: one matrix for each group
        shape = (len(ends), *shape)
    return first.new_empty(shape)


def _layer_norm(x: Tensor, *args: object) -> tuple[Tensor, ...]:
    """Return a normalization, whose statistics have the dtype of x on a CPU."""
    normalized, *statistics = torch.ops.aten.native_layer_norm(x, *args)
    return normalized, *(each.to(x.dtype) for each in statistics)


_ALLOCATING_OTHERWISE = MappingProxyType(
    {
        torch.ops.aten._grouped_mm.default: _grouped_product,
        torch.ops.aten.native_layer_norm.default: _layer_norm,
    }
)


_ELEMENTWISE = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.div.Scalar,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.mul.Scalar,
        torch.ops.aten.mul.Tensor,
    }
)


def _elementwise(first: Tensor, second: Tensor | float) -> Tensor:
    """Return a tensor of their sum, product or quotient, for which META takes ten times as long."""
    shapes = (first.shape, second.shape if isinstance(second, Tensor) else ())
    dtype = torch.result_type(first, second)
    return torch.empty(torch.broadcast_shapes(*shapes), dtype=dtype, device=META)


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(META)


def _makes_integers(func: Callable, options: Mapping[str, Any]) -> bool:
    """Whether a function that takes no tensors returns one of integers or booleans."""
    dtype = options.get("dtype")
    if dtype is None:
        return func.name().startswith("aten::arange")
    return not (dtype.is_floating_point or dtype.is_complex)
