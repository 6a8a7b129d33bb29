"""Codes for gradients in plain PyTorch, uniform and not, with and without a rotation.

A block shares a scale in bf16, truncated. Uniform codes, c for the nearest of x / scale, and top:

| scale       | before it is truncated                   | codes                                   |
|-------------|------------------------------------------|-----------------------------------------|
| `extreme`   | -extreme / top                           | -top ... top - 1                        |
| `symmetric` | largest / (top - 1)                      | 1 - top ... top - 1                     |
| `half-step` | largest times a factor                   | odd: -2 top + 1 ... 2 top - 1           |
| `rms`       | root mean square times a factor          | -128 ... 127                            |

The extreme is the element of the largest magnitude, with its sign. Stochastic rounding goes up with
the probability of the fraction. Tables have levels, of which the largest is a block's largest.
"""

import importlib
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.reference import rotate, unrotate

zstd = importlib.import_module(
    "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
)
CHUNK = 1 << 18  # bytes that are compressed together
SCALE_BITS = 16
FP4 = (0.5, 1, 1.5, 2, 3, 4, 6)
LOGARITHMIC = tuple(2.0**-power for power in range(6, -1, -1))


@dataclass(frozen=True)
class Coded:
    """What codes stand for, in the shape of the input; codes 0 ... levels - 1; blocks."""

    values: Tensor
    codes: Tensor
    blocks: int


@dataclass(frozen=True, kw_only=True)
class GradientCode:
    """A code; `levels`, positive and ascending, for a code that is not uniform."""

    name: str
    block: int
    top: int = 8
    scale: str = "extreme"
    factor: float = 1.0
    is_rotated: bool = False
    is_stochastic: bool = False
    levels: tuple[float, ...] = ()

    def round_trip(self, matrix: Tensor) -> Coded:
        """Quantize and dequantize a matrix of a multiple of 32 elements."""
        flat = matrix.reshape(1, -1)
        flat = rotate(flat) if self.is_rotated else flat
        padded = pad(flat, (0, -flat.shape[1] % self.block)).view(-1, self.block)
        scale = truncated(self._exact_scale(padded))[:, None]
        steps = torch.where(scale == 0, 0.0, padded * (1.0 / scale))
        numbers, codes = self._nearest(steps)
        values = (numbers * scale).view(1, -1)[:, : flat.shape[1]]
        values = unrotate(values) if self.is_rotated else values
        return Coded(values.view(matrix.shape), codes.flatten()[: flat.shape[1]], len(padded))

    def _exact_scale(self, blocks: Tensor) -> Tensor:
        high, low = blocks.amax(1), blocks.amin(1)
        largest = torch.maximum(high, -low)
        if self.levels:
            return largest / self.levels[-1]
        if self.scale == "rms":
            return blocks.square().mean(1).sqrt() * self.factor
        if self.scale == "symmetric":
            return largest * (1 / (self.top - 1))
        if self.scale == "half-step":
            return largest * self.factor
        return torch.where(high >= -low, high, low) * (-1 / self.top)

    def _nearest(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """What codes stand for, in scales, and the codes from 0 on."""
        if self.levels:
            levels = torch.tensor([-level for level in reversed(self.levels)] + [0, *self.levels])
            codes = torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2)
            return levels[codes], codes
        top = 128 if self.scale == "rms" else self.top
        if self.scale == "half-step":
            codes = (steps * 0.5 - 0.5).round().clamp(-top, top - 1)
            return 2 * codes + 1, codes + top
        if self.is_stochastic:
            generator = torch.Generator().manual_seed(9)
            codes = (steps + torch.rand(steps.shape, generator=generator)).floor()
        else:
            codes = steps.round()
        codes = codes.clamp(-top, top - 1)
        return codes, codes + top


def truncated(scale: Tensor) -> Tensor:
    """To bf16, as fp32."""
    return (scale.view(torch.int32) >> 16 << 16).view(torch.float32)


def coded_bits(results: Sequence[Coded]) -> tuple[float, float]:
    """Bits of an element after Zstandard, and by the entropy of single codes; with scales."""
    compressed = entropy = 0.0
    for result in results:
        codes = result.codes - result.codes.min()
        counts = torch.bincount(codes.long()).double()
        shares = counts[counts > 0] / len(codes)
        entropy -= float((shares * shares.log2()).sum()) * len(codes)
        packed = codes.to(torch.uint8)
        if len(counts) <= 16:
            packed = packed[0::2] | packed[1::2] << 4
        chunks = (chunk.numpy().tobytes() for chunk in packed.split(CHUNK))
        compressed += 8 * sum(len(zstd.compress(chunk, 1)) for chunk in chunks)
    scales = SCALE_BITS * sum(result.blocks for result in results)
    elements = sum(len(result.codes) for result in results)
    return (compressed + scales) / elements, (entropy + scales) / elements


def candidates() -> list[GradientCode]:
    """What was considered, zeropp's own formats among it."""
    uniform = [
        GradientCode(name="INT8, blocks of 256", block=256, top=128),
        GradientCode(name="INT6, blocks of 256", block=256, top=32),
        GradientCode(name="INT5, blocks of 128", block=128, top=16),
        *(GradientCode(name=f"INT4, blocks of {block}", block=block) for block in (32, 64, 128)),
        GradientCode(name="INT4, stochastic", block=128, is_stochastic=True),
        GradientCode(name="FP4, blocks of 128", block=128, levels=FP4),
        GradientCode(name="FP4, blocks of 32", block=32, levels=FP4),
        GradientCode(name="powers of two", block=128, levels=LOGARITHMIC),
        GradientCode(name="square roots, 15 levels", block=128, levels=squares(7)),
        GradientCode(name="square roots, 31 levels", block=128, levels=squares(15)),
    ]
    rotated = [
        GradientCode(name="rotated INT4", block=128, scale="symmetric", is_rotated=True),
        GradientCode(name="rotated INT4, 256", block=256, scale="symmetric", is_rotated=True),
        GradientCode(name="rotated INT4, -extreme/8", block=128, is_rotated=True),
        GradientCode(
            name="rotated INT4, half-step", block=128, scale="half-step", factor=1 / 15,
            is_rotated=True,
        ),
        GradientCode(name="rotated INT5", block=128, top=16, scale="symmetric", is_rotated=True),
        GradientCode(
            name="INT3", block=64, top=4, scale="half-step", factor=9 / 64, is_rotated=True
        ),
    ]  # fmt: skip
    scaled = [
        GradientCode(
            name=f"rms x {factor}{', rotated' * is_rotated}", block=128, scale="rms",
            factor=factor, is_rotated=is_rotated,
        )
        for factor, is_rotated in itertools.product((0.5, 0.67, 1.0), (False, True))
    ]  # fmt: skip
    return [*uniform, *rotated, *scaled]


def squares(count: int) -> tuple[float, ...]:
    """Levels whose square roots are even."""
    return tuple(math.pow(index / count, 2) for index in range(1, count + 1))
