"""Codes for blocks of numbers that share a scale, in plain PyTorch.

| code        | scale before rounding     | codes                        | the block's extreme     |
|-------------|---------------------------|------------------------------|-------------------------|
| `symmetric` | largest / (top - 1)       | 1 - top ... top - 1          | stays                   |
| `clipped`   | largest / top             | -top ... top - 1             | stays, or a step less   |
| `signed`    | -extreme / top            | -top ... top - 1             | stays                   |
| `shrunk`    | 0.95 of `signed`          | -top ... top - 1             | 0.95 of it              |
| `half-step` | largest / (2 top - 1)     | odd: 1 - 2 top ... 2 top - 1 | stays                   |
| `rms`       | root mean square x factor | -top ... top - 1             | what the last code says |

The extreme is the element of the largest magnitude, with its sign. zeropp uses `signed` with scales
in bf16, truncated rather than rounded (`bf16`), and `symmetric` and `half-step` of rotated numbers.
Stochastic rounding goes up with the probability of the fraction. A code that is not uniform has
levels, of which the largest is a block's largest.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.shared.interleaved import Disagreement
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import RowLayout
from zeropp.quant.reference import rotate, unrotate

SHRINK = 0.95
CODES = ("symmetric", "clipped", "signed", "shrunk", "half-step")
FP4 = (0.5, 1, 1.5, 2, 3, 4, 6)
LOGARITHMIC = tuple(2.0**-power for power in range(6, -1, -1))


def _truncate_to_bf16(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> 16 << 16).view(torch.float32)


def _power_of_two(scale: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int()) * (scale != 0)


SCALES: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {  # name -> bytes of a scale, how it is rounded
        "fp32": (4, lambda scale: scale),
        "bf16": (2, _truncate_to_bf16),
        "bf16 nearest": (2, lambda scale: scale.to(torch.bfloat16).float()),
        "fp16": (2, lambda scale: scale.to(torch.float16).float()),
        "2^n": (1, _power_of_two),
    }
)


@dataclass(frozen=True)
class Coded:
    """What codes stand for, in the shape of the input; codes 0 ... levels - 1; blocks."""

    values: Tensor
    codes: Tensor
    blocks: int


@dataclass(frozen=True, kw_only=True)
class BlockCode:
    """A code, and a scale per `block` elements; scales of 2^n have no sign.

    factor: of the scale of `rms`, and of `half-step` if it is another one. levels: positive and
    ascending, of a code that is not uniform.
    """

    name: str = ""
    block: int
    top: int = 8
    code: str = "signed"
    scale: str = "bf16"
    factor: float | None = None
    is_rotated: bool = False
    is_stochastic: bool = False
    levels: tuple[float, ...] = ()

    @property
    def bytes_per_element(self) -> float:
        """Bytes of packed codes and scales."""
        return (1 + math.log2(self.top)) / 8 + SCALES[self.scale][0] / self.block

    def round_trip(self, tensor: Tensor) -> Coded:
        """Quantize and dequantize a tensor; one of a multiple of 32 elements if it is rotated."""
        flat = tensor.reshape(1, -1)
        flat = rotate(flat) if self.is_rotated else flat
        padded = pad(flat, (0, -flat.shape[1] % self.block)).view(-1, self.block)
        _, round_scale = SCALES[self.scale]
        scale = round_scale(self._exact_scale(padded))[:, None]
        steps = torch.where(scale == 0, 0.0, padded * (1.0 / scale))
        numbers, codes = self._nearest(steps)
        values = (numbers * scale).view(1, -1)[:, : flat.shape[1]]
        values = unrotate(values) if self.is_rotated else values
        return Coded(values.view(tensor.shape), codes.flatten()[: flat.shape[1]], len(padded))

    def _exact_scale(self, blocks: Tensor) -> Tensor:
        """(blocks, block) -> (blocks,) fp32."""
        top, high, low = self.top, blocks.amax(-1), blocks.amin(-1)
        largest = torch.maximum(high, -low)
        if self.levels:
            return largest / self.levels[-1]
        if self.code == "rms":
            return blocks.square().mean(-1).sqrt() * self.factor
        extreme = torch.where(high >= -low, high, low)
        return {
            "symmetric": largest * (1 / (top - 1)),
            "clipped": largest / top,
            "signed": extreme * (-1 / top),
            "shrunk": extreme * (SHRINK / -top),
            "half-step": largest * (self.factor or 1 / (2 * top - 1)),
        }[self.code]

    def _nearest(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """What codes stand for, in scales, and the codes from 0 on."""
        top = self.top
        if self.levels:
            levels = torch.tensor([-level for level in reversed(self.levels)] + [0, *self.levels])
            codes = torch.bucketize(steps, (levels[1:] + levels[:-1]) / 2)
            return levels[codes], codes
        if self.code == "half-step":
            codes = (steps * 0.5 - 0.5).round().clamp(-top, top - 1)
            return 2 * codes + 1, codes + top
        if self.is_stochastic:
            generator = torch.Generator().manual_seed(9)
            codes = (steps + torch.rand(steps.shape, generator=generator)).floor()
        else:
            codes = steps.round()
        codes = codes.clamp(1 - top if self.code == "symmetric" else -top, top - 1)
        return codes, codes + top


def zeropp_round_trip(values: Tensor, bits: int) -> Tensor:
    """Quantize and dequantize `values` (n,) with the ops of zeropp."""
    layout = RowLayout(sizes=(len(values),), bits=(bits,), wire=torch.float32)
    out = torch.empty(1, len(values))
    dequantize(quantize(values[None], layout), out, layout)
    return out[0]


def verify(codes: Mapping[str, tuple[BlockCode, int]], tensors: Iterable[Tensor]) -> None:
    """Raise Disagreement unless each code gives the numbers of the ops with its bits."""
    for (name, (code, bits)), tensor in itertools.product(codes.items(), tensors):
        own = code.round_trip(tensor).values.flatten()
        if not torch.equal(own, zeropp_round_trip(tensor.flatten(), bits)):
            raise Disagreement(f"{name}: the ops and the model differ; nothing was measured")


def gain_of(exact: Tensor, result: Tensor) -> float:
    """The factor of the least-squares fit of the result to exact values (n,); 1 if all are 0."""
    exact, result = exact.double(), result.double()
    size = float(exact @ exact)
    return float(exact @ result) / size if size else 1.0


def candidates() -> list[BlockCode]:
    """What was considered for gradients, zeropp's own formats among it."""
    uniform = [("INT8", 256, 128), ("INT6", 256, 32), ("INT5", 128, 16)]
    uniform += [("INT4", block, 8) for block in (32, 64, 128)]
    levels = [("FP4, blocks of 128", 128, FP4), ("FP4, blocks of 32", 32, FP4)]
    levels += [("powers of two", 128, LOGARITHMIC)]
    levels += [(f"square roots, {2 * n + 1} levels", 128, _squares(n)) for n in (7, 15)]
    rotated = [
        ("rotated INT4", 128, 8, "symmetric", None),
        ("rotated INT4, 256", 256, 8, "symmetric", None),
        ("rotated INT4, -extreme/8", 128, 8, "signed", None),
        ("rotated INT4, half-step", 128, 8, "half-step", None),
        ("rotated INT5", 128, 16, "symmetric", None),
        ("INT3", 64, 4, "half-step", 9 / 64),
    ]
    return [
        *(BlockCode(name=f"{n}, blocks of {b}", block=b, top=top) for n, b, top in uniform),
        BlockCode(name="INT4, stochastic", block=128, is_stochastic=True),
        *(BlockCode(name=name, block=block, levels=given) for name, block, given in levels),
        *(
            BlockCode(name=name, block=block, top=top, code=code, factor=factor, is_rotated=True)
            for name, block, top, code, factor in rotated
        ),
        *(
            BlockCode(
                name=f"rms x {factor}{', rotated' * is_rotated}", block=128, top=128, code="rms",
                factor=factor, is_rotated=is_rotated,
            )
            for factor, is_rotated in itertools.product((0.5, 0.67, 1.0), (False, True))
        ),
    ]  # fmt: skip


def _squares(count: int) -> tuple[float, ...]:
    """Levels whose square roots are even."""
    return tuple((index / count) ** 2 for index in range(1, count + 1))
