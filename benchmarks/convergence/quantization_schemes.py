"""Schemes that represent a block of numbers by integers and one scale, in plain PyTorch.

| code        | scale before rounding      | integers      | a block's extreme becomes             |
|-------------|----------------------------|---------------|---------------------------------------|
| `symmetric` | largest / (2^(b-1) - 1)    | 2^b - 1       | itself                                |
| `clipped`   | largest / 2^(b-1)          | all 2^b       | itself if negative, else a step less  |
| `signed`    | -extreme / 2^(b-1)         | all 2^b       | itself                                |
| `shrunk`    | 0.95 of `signed`           | all 2^b       | 0.95 of itself                        |
| `half-step` | largest / (2^(b-1) - 1/2)  | all 2^b, no 0 | itself                                |

The extreme is the element of the largest magnitude, with its sign. zeropp uses `signed` with scales
in bf16, truncated rather than rounded (`bf16`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import RowLayout

SHRINK = 0.95
CODES = ("symmetric", "clipped", "signed", "shrunk", "half-step")


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


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Integers of `bits` bits, and a scale per `block` elements; scales of 2^n have no sign."""

    bits: int
    block: int
    code: str = "signed"
    scale: str = "bf16"

    @property
    def bytes_per_element(self) -> float:
        return self.bits / 8 + SCALES[self.scale][0] / self.block

    def round_trip(self, values: Tensor) -> Tensor:
        """Quantize and dequantize `values` (n,) fp32."""
        num_blocks = -(-len(values) // self.block)
        padding = num_blocks * self.block - len(values)
        blocks = pad(values, (0, padding)).view(num_blocks, self.block)
        _, round_scale = SCALES[self.scale]
        scale = round_scale(self._exact_scale(blocks))[:, None]
        top = 1 << (self.bits - 1)
        steps = torch.where(scale == 0, 0.0, blocks * (1.0 / scale))
        if self.code == "half-step":
            numbers = (steps.floor().clamp(-top, top - 1) + 0.5) * scale
        else:
            lowest = 1 - top if self.code == "symmetric" else -top
            numbers = steps.round().clamp(lowest, top - 1) * scale
        return numbers.flatten()[: len(values)]

    def _exact_scale(self, blocks: Tensor) -> Tensor:
        """(blocks, block) -> (blocks,) fp32."""
        top, high, low = 1 << (self.bits - 1), blocks.amax(-1), blocks.amin(-1)
        largest = torch.maximum(high, -low)
        extreme = torch.where(high >= -low, high, low)
        return {
            "symmetric": largest / (top - 1),
            "clipped": largest / top,
            "signed": extreme / -top,
            "shrunk": extreme * (SHRINK / -top),
            "half-step": largest / (top - 0.5),
        }[self.code]


def zeropp_round_trip(values: Tensor, bits: int) -> Tensor:
    """Quantize and dequantize `values` (n,) with the ops of zeropp."""
    layout = RowLayout(sizes=(len(values),), bits=(bits,), wire=torch.float32)
    out = torch.empty(1, len(values))
    dequantize(quantize(values[None], layout), out, layout)
    return out[0]
