"""Dense peak rates of matrix products on NVIDIA GPUs, as the vendor's data sheets state them.

In TFLOP/s. Where a data sheet gives rates with structured sparsity, the table has half of them, and
tensor-core rates are those with fp32 accumulation. A GPU is recognized by its whole name as CUDA
reports it, so that a variant that is not listed (a laptop's GPU, a MIG slice) has no peak
rather than a wrong one.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """TFLOP/s by format; None where the GPU's tensor cores do not have the format."""

    fp16: float
    bf16: float | None = None
    tf32: float | None = None
    fp32: float  # without tensor cores


# NVIDIA Tesla V100 GPU Accelerator, data sheet (January 2020): SXM2 125 | 15.7, PCIe 112 | 14.
V100_SXM = Peaks(fp16=125, fp32=15.7)
V100_PCIE = Peaks(fp16=112, fp32=14)
# NVIDIA A100 Tensor Core GPU, data sheet (2022): 312 | 312 | 156 | 19.5 for SXM and PCIe.
A100 = Peaks(fp16=312, bf16=312, tf32=156, fp32=19.5)
# NVIDIA A10 Tensor Core GPU, data sheet (2021): 125 | 125 | 62.5 | 31.2.
A10 = Peaks(fp16=125, bf16=125, tf32=62.5, fp32=31.2)
# NVIDIA H100 Tensor Core GPU, data sheet (2023), with sparsity: SXM 1979 | 1979 | 989 | 67,
# PCIe 1513 | 1513 | 756 | 51. The data sheet of the H800 gives the same.
H100_SXM = Peaks(fp16=989.5, bf16=989.5, tf32=494.5, fp32=67)
H100_PCIE = Peaks(fp16=756.5, bf16=756.5, tf32=378, fp32=51)
# NVIDIA H200 Tensor Core GPU, data sheet (2024), with sparsity: SXM 1979 | 1979 | 989 | 67.
H200_SXM = Peaks(fp16=989.5, bf16=989.5, tf32=494.5, fp32=67)
# NVIDIA L4 Tensor Core GPU, data sheet (2023), with sparsity: 242 | 242 | 120 | 30.3.
L4 = Peaks(fp16=121, bf16=121, tf32=60, fp32=30.3)
# NVIDIA L40S GPU, data sheet (2023), dense: 362.05 | 362.05 | 183 | 91.6.
L40S = Peaks(fp16=362.05, bf16=362.05, tf32=183, fp32=91.6)
# NVIDIA Ada GPU Architecture, whitepaper (2023), appendix A: 165.2 | 165.2 | 82.6 | 82.6.
RTX_4090 = Peaks(fp16=165.2, bf16=165.2, tf32=82.6, fp32=82.6)

BY_NAME = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": V100_SXM,
        "Tesla V100-SXM2-32GB": V100_SXM,
        "Tesla V100-PCIE-16GB": V100_PCIE,
        "Tesla V100-PCIE-32GB": V100_PCIE,
        "NVIDIA A100-SXM4-40GB": A100,
        "NVIDIA A100-SXM4-80GB": A100,
        "NVIDIA A100-PCIE-40GB": A100,
        "NVIDIA A100 80GB PCIe": A100,
        "NVIDIA A10": A10,
        "NVIDIA H100 80GB HBM3": H100_SXM,
        "NVIDIA H100 PCIe": H100_PCIE,
        "NVIDIA H800": H100_SXM,
        "NVIDIA H800 PCIe": H100_PCIE,
        "NVIDIA H200": H200_SXM,
        "NVIDIA L4": L4,
        "NVIDIA L40S": L40S,
        "NVIDIA GeForce RTX 4090": RTX_4090,
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
