"""Dense peak rates of matrix products on NVIDIA GPUs, of the data sheets in `gpu_peaks.toml`.

A GPU is recognized by its whole name as CUDA reports it, so that a variant that is not listed (a
laptop's GPU, a MIG slice) has no peak rather than a wrong one.
"""

from types import MappingProxyType

import torch

from zeropp.settings import read_toml

FORMATS = MappingProxyType({torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"})
BY_NAME = MappingProxyType(  # TFLOP/s by format
    {
        name: row["peaks"]
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
    peaks, kind = BY_NAME.get(name, {}), FORMATS[dtype]
    if kind == "fp32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in peaks:
        kind = "tf32"
    return peaks[kind] * 1e12 if kind in peaks else None
