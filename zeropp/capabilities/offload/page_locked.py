"""Tensors in page-locked memory, which copies to and from a GPU need to run beside other work."""

import mmap
import weakref

import torch


class _Pages(mmap.mmap):
    """The memory of a tensor; a subclass, whose weak references end before the memory does."""


def page_locked(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in as many page-locked pages as it needs, or raise RuntimeError.

    PyTorch's allocator would round its bytes up to a power of two.
    """
    if not (num_bytes := shape.numel() * dtype.itemsize):
        return torch.empty(shape, dtype=dtype)
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)  # its storage holds the pages
    address = tensor.data_ptr()
    if error := int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)):
        torch.ones((), device="cuda")  # CUDA keeps the error, and PyTorch finds it here and raises
        raise RuntimeError(f"cudaHostRegister returns {error}")
    weakref.finalize(pages, _unlock, address).atexit = False
    return tensor


def _unlock(address: int) -> None:
    torch.cuda.synchronize()  # copies may be under way
    torch.cuda.cudart().cudaHostUnregister(address)
