"""Dense peak rates of matrix products on NVIDIA GPUs, of the data sheets in `gpu_peaks.toml`.

A GPU is recognized by its whole name as CUDA reports it, so that a variant that is not listed (a
laptop's GPU, a MIG slice) has no peak rather than a wrong one.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch

from zeropp.settings.no_effect_tables import read_toml


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """TFLOP/s by format; None where the GPU's tensor cores do not have the format."""

    fp16: float
    bf16: float | None = None
    tf32: float | None = None
    fp32: float  # without tensor cores


BY_NAME = MappingProxyType(
    {
        name: Peaks(**row["peaks"])
        for row in read_toml(__package__, "gpu_peaks.toml")["gpus"]
        for name in row["names"]
    }
)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the data sheet's dense FLOP/s of products in `dtype`; None where it is not known.

    fp32 products use TF32 where `torch.set_float32_matmul_precision` allows it.
    """
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> float | None:
    """`peak_flops` of the GPU that CUDA calls `name`."""
    peaks = BY_NAME.get(name)
    if peaks is None:
        return None
    fp32 = peaks.fp32
    if torch.get_float32_matmul_precision() != "highest" and peaks.tf32 is not None:
        fp32 = peaks.tf32
    teraflops = {torch.float16: peaks.fp16, torch.bfloat16: peaks.bf16, torch.float32: fp32}[dtype]
    return None if teraflops is None else teraflops * 1e12
