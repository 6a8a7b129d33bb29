"""`deepspeed.runtime.utils`: what memory a program uses."""

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

from zeropp.deepspeed.names import attribute_of
from zeropp.ranks.host_memory import free_bytes

GB = 2**30


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Any:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does; return their norm."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as Python spells it."""
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{base}({', '.join(given)})"


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print a message and the memory in use, on rank 0; nothing unless `force` is set.

    MA and CA are what PyTorch has allocated and reserved on the GPU, Max_MA and Max_CA the most of
    it since the last call. On a machine without a GPU only the host's memory is printed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    lines = [message]
    if torch.cuda.is_available():
        numbers = {
            "MA": torch.cuda.memory_allocated(),
            "Max_MA": torch.cuda.max_memory_allocated(),
            "CA": torch.cuda.memory_reserved(),
            "Max_CA": torch.cuda.max_memory_reserved(),
        }
        lines.append(" ".join(f"{name} {value / GB:.2f} GB" for name, value in numbers.items()))
        torch.cuda.reset_peak_memory_stats()
    if (free := free_bytes()) is not None:
        lines.append(f"CPU memory that is free: {free / GB:.2f} GB")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


__getattr__ = attribute_of(__name__)
