"""Ways to write a block of numbers as integers and one scale, in plain PyTorch, to be compared.

| code        | scale before it is rounded | codes          | a block's extreme becomes            |
|-------------|----------------------------|----------------|--------------------------------------|
| `symmetric` | largest / (2^(b-1) - 1)    | one fewer      | itself                               |
| `clipped`   | largest / 2^(b-1)          | all 2^b        | itself if negative, else a step less |
| `signed`    | -extreme / 2^(b-1)         | all 2^b        | itself                               |
| `shrunk`    | 0.95 of `signed`           | all 2^b        | 0.95 of itself                       |
| `half-step` | largest / (2^(b-1) - 1/2)  | all 2^b, no 0  | itself                               |

The extreme is the element of the largest magnitude, with its sign. `signed` with scales in bf16,
cut off rather than rounded (`bf16`), is what zeropp does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import Layout

SHRINK = 0.95
CODES = ("symmetric", "clipped", "signed", "shrunk", "half-step")


def _cut(scale: Tensor) -> Tensor:
    return (scale.view(torch.int32) >> 16 << 16).view(torch.float32)


def _power_of_two(scale: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (fraction == 0.5).int()) * (scale != 0)


SCALES: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {  # name -> bytes, what becomes of a scale
        "fp32": (4, lambda scale: scale),
        "bf16": (2, _cut),
        "bf16 nearest": (2, lambda scale: scale.to(torch.bfloat16).float()),
        "fp16": (2, lambda scale: scale.to(torch.float16).float()),
        "2^n": (1, _power_of_two),
    }
)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Codes of `bits` bits, and for every `block` elements a scale; no sign for scales of 2^n."""

    bits: int
    block: int
    code: str = "signed"
    scale: str = "bf16"

    @property
    def bytes_per_element(self) -> float:
        return self.bits / 8 + SCALES[self.scale][0] / self.block

    def there_and_back(self, values: Tensor) -> Tensor:
        """What `values` (n,) fp32 become."""
        blocks = -(-len(values) // self.block)
        cut = pad(values, (0, blocks * self.block - len(values))).view(blocks, self.block)
        scale = SCALES[self.scale][1](self._exact_scale(cut))[:, None]
        top = 1 << (self.bits - 1)
        steps = torch.where(scale == 0, 0.0, cut * (1.0 / scale))
        if self.code == "half-step":
            found = (steps.floor().clamp(-top, top - 1) + 0.5) * scale
        else:
            lowest = 1 - top if self.code == "symmetric" else -top
            found = steps.round().clamp(lowest, top - 1) * scale
        return found.flatten()[: len(values)]

    def _exact_scale(self, cut: Tensor) -> Tensor:
        """(blocks, block) -> (blocks,) fp32."""
        top, high, low = 1 << (self.bits - 1), cut.amax(-1), cut.amin(-1)
        largest = torch.maximum(high, -low)
        extreme = torch.where(high >= -low, high, low)
        return {
            "symmetric": largest / (top - 1),
            "clipped": largest / top,
            "signed": extreme / -top,
            "shrunk": extreme * (SHRINK / -top),
            "half-step": largest / (top - 0.5),
        }[self.code]


def built(values: Tensor, bits: int) -> Tensor:
    """What `values` (n,) become by the ops of zeropp."""
    layout = Layout(sizes=(len(values),), bits=(bits,), wire=torch.float32)
    out = torch.empty(1, len(values))
    dequantize(quantize(values[None], layout), out, layout)
    return out[0]
