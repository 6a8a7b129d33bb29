"""`--deterministic-mode`: kernels that give the same digits every time they run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeropp.ranks import use_deterministic_cublas


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let PyTorch raise RuntimeError for an operation without a deterministic kernel.

    It has to be entered before the first product of matrices on a GPU.
    """
    before = torch.are_deterministic_algorithms_enabled()
    use_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
