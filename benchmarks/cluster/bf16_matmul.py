"""bf16 matrix products computed in fp32, for processors without bf16 arithmetic.

Without AVX-512 or AMX instructions for bfloat16, PyTorch multiplies bf16 matrices many times slower
than fp32 ones, and a step would measure nothing else. Operands and results stay bf16, and sums are
taken in fp32 as bf16 hardware does; only the kernel changes, for every configuration alike.
"""

from collections.abc import Callable

import torch

from tools.faster_precision import seconds

PRODUCT_OPS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)


def bf16_is_slow() -> bool:
    """Whether one thread multiplies bf16 matrices slower than fp32 ones."""
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    torch.set_num_threads(1)
    is_slow = seconds(torch.bfloat16, cpu) > seconds(torch.float32, cpu)
    torch.set_num_threads(threads)
    return is_slow


def multiply_in_fp32() -> torch.library.Library:
    """Multiply bf16 matrices in fp32 in this process, until the returned library is deleted."""
    library = torch.library.Library("aten", "IMPL")
    for name in PRODUCT_OPS:
        library.impl(name, _in_fp32(name), "CPU", with_keyset=True, allow_override=True)
    return library


def _in_fp32(name: str) -> Callable:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keyset, *args, **kwargs):
        dtype = next(value.dtype for value in args if isinstance(value, torch.Tensor))
        if dtype != torch.bfloat16:
            return original.call_boxed(keyset, *args, **kwargs)
        wide = [_cast(value, torch.bfloat16, torch.float32) for value in args]
        result = original.call_boxed(keyset, *wide, **kwargs)
        if isinstance(result, tuple):
            # Attention's first result is its output, the others are statistics in fp32. All results
            # of its backward are gradients.
            is_backward = name.endswith("_backward")
            return tuple(
                _cast(value, torch.float32, dtype) if is_backward or index == 0 else value
                for index, value in enumerate(result)
            )
        return result.to(dtype)

    return product


def _cast(value: object, old: torch.dtype, new: torch.dtype) -> object:
    is_old = isinstance(value, torch.Tensor) and value.dtype == old
    return value.to(new) if is_old else value
