"""How fast this rank's device multiplies large matrices: what its throughput is a share of (MFU).

Measured, not looked up: it holds for any device, and for the clock and the cores this run has.
"""

import time

import torch

SMALLEST, LARGEST = 256, 8192  # rows and columns
ENOUGH_SECONDS = 2e-3  # a product that takes so long is large enough
TOO_LONG_SECONDS = 2e-2  # to be repeated
REPETITIONS = 10


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second, two per multiply-add, of a product of square matrices on `device`.

    The best of the sizes that double until a product takes 2 ms; numbers are random, as products
    of zeros are faster on a GPU. Costs some hundredths of a second.
    """
    size, best = SMALLEST, 0.0
    while True:
        seconds = _seconds(torch.randn(size, size, device=device).to(dtype))
        best = max(best, 2 * size**3 / seconds)
        if seconds >= ENOUGH_SECONDS or size == LARGEST:
            return best
        size *= 2


def _seconds(matrix: torch.Tensor) -> float:
    """Of one product: the mean of several that follow each other, unless one takes long."""
    _timed(matrix, 1)  # the first one sets things up
    alone = _timed(matrix, 1)
    return min(alone, _timed(matrix, REPETITIONS)) if alone < TOO_LONG_SECONDS else alone


def _timed(matrix: torch.Tensor, repetitions: int) -> float:
    _finish(matrix)
    started = time.perf_counter()
    for _ in range(repetitions):
        matrix @ matrix
    _finish(matrix)
    return (time.perf_counter() - started) / repetitions


def _finish(matrix: torch.Tensor) -> None:
    if matrix.device.type != "cpu":
        torch.accelerator.synchronize()
