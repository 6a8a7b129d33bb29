"""How fast this rank's device multiplies large matrices: measured, and by its data sheet.

The measured rate exists for any device, and holds for the clock and the cores that this run has.
Model FLOPs utilization (MFU) is a share of the data sheet's peak (Chowdhery et al. 2022, arXiv
2204.02311, appendix B). Dense peaks of NVIDIA GPUs are in `gpu_peaks.toml`. A GPU is recognized by
its whole name as CUDA reports it, so that a variant that is not listed (a laptop's GPU, a MIG
slice) has no peak rather than a wrong one.
"""

import logging
import time
from dataclasses import dataclass
from types import MappingProxyType

import torch

from zeropp.settings import read_toml

SMALLEST, LARGEST = 256, 8192  # rows and columns
ENOUGH_SECONDS = 2e-3  # a product that takes so long is large enough
TOO_LONG_SECONDS = 2e-2  # to be repeated
REPETITIONS = 10
FORMATS = MappingProxyType({torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"})
BY_NAME = MappingProxyType(  # TFLOP/s by format
    {
        name: row["peaks"]
        for row in read_toml(__package__, "gpu_peaks.toml")["gpus"]
        for name in row["names"]
    }
)

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """FLOP/s of a device in one dtype: `measured`, and the data sheet's dense `peak` if known."""

    measured: float
    peak: float | None = None


def matmul_rate(device: torch.device, dtype: torch.dtype) -> MatmulRate:
    """Measure the rate of `device` and look up its peak; costs some hundredths of a second."""
    return MatmulRate(measured=measure_matmul_rate(device, dtype), peak=peak_flops(device, dtype))


def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s, two per multiply-add, of a product of square matrices on `device`.

    The best of the sizes that double until a product takes 2 ms. The elements are random, because
    products of zeros are faster on a GPU.
    """
    size, best = SMALLEST, 0.0
    while True:
        seconds = _seconds(torch.randn(size, size, device=device).to(dtype))
        best = max(best, 2 * size**3 / seconds)
        if seconds >= ENOUGH_SECONDS or size == LARGEST:
            return best
        size *= 2


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the data sheet's dense FLOP/s of products in `dtype`; None where it is not known.

    fp32 products use TF32 where `torch.set_float32_matmul_precision` allows it.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """`peak_flops` of the GPU that CUDA calls `name`."""
    peaks, kind = BY_NAME.get(name, {}), FORMATS[dtype]
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in peaks:
        kind = "tf32"
    return peaks[kind] * 1e12 if kind in peaks else None


def warn_if_float32_is_faster(device: torch.device, dtype: torch.dtype) -> None:
    """Log a warning where a processor multiplies float32 much faster; takes less than 0.2 s."""
    if device.type != "cpu" or dtype == torch.float32:
        return
    own, float32 = (
        2 * SMALLEST**3 / 1e9 / _seconds(torch.ones(SMALLEST, SMALLEST, dtype=each))
        for each in (dtype, torch.float32)
    )
    if 3 * own < float32:  # without instructions for it, 20 to 100 times
        log.warning(
            f"this processor multiplies {str(dtype).removeprefix('torch.')} at {own:.1f} GFLOP/s, "
            f"and float32 at {float32:.1f}: leave out --bf16, --fp16 or --dtype, and bf16.enabled "
            "or fp16.enabled in the JSON, to be faster"
        )


def _seconds(matrix: torch.Tensor) -> float:
    """Seconds of one product: the mean of several in a row, unless one takes long."""
    _timed(matrix, 1)  # warm-up
    single = _timed(matrix, 1)
    return min(single, _timed(matrix, REPETITIONS)) if single < TOO_LONG_SECONDS else single


def _timed(matrix: torch.Tensor, repetitions: int) -> float:
    is_queued = matrix.device.type != "cpu"
    if is_queued:
        torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(repetitions):
        matrix @ matrix
    if is_queued:
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) / repetitions
