"""Tensors for Adam, also with extreme values, and comparisons with the reference, bit by bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice

import torch
from torch import Tensor

from tests.zeropp.quant.packed_bytes import Bits, any_rows, bits_of
from zeropp.optim.adam_op import AdamSettings, Arrays, reference

SIZES = (1, 3, 4, 31, 128, 1023, 1024, 1025, 1028, 2048 + 12, 5000)  # a tile has 1024 elements
KEPT = 64  # results of the reference, of up to some MB
COPIES = (None, torch.bfloat16, torch.float16)
EDGES = (
    0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.17549435e-38, 1e-20, 1e-8, 1.0, -3.0, 1e18, 2e19, 3.4e38,
    -3.4e38, float("inf"), -float("inf"), float("nan"),
)  # fmt: skip
ADAMW = AdamSettings(lr=3e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
ADAM = AdamSettings(
    lr=0.2, beta1=0.8, beta2=0.95, eps=1e-10, weight_decay=0.01, step=1, decoupled=False
)
PLAIN = AdamSettings(
    lr=1.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1, corrected=False
)


@dataclass(frozen=True)
class Kernel:
    """What does Adam's arithmetic on arrays of a device."""

    name: str
    run: Callable[[Arrays, Tensor | None, AdamSettings], None]
    device: str = "cpu"

    @property
    def is_exact(self) -> bool:
        """Whether it takes one element after another."""
        return self.name == "math.h"


def arrays_of(
    sizes: Sequence[int], dtype: torch.dtype, copy: torch.dtype | None = None, seed: int = 0
) -> Arrays:
    """Numbers of all magnitudes with zeros, subnormals, infinities and NaN among them."""
    filled = [
        tuple(
            any_rows(1, size, torch.float32, seed + 7 * index + part)[0].nan_to_num(
                *((float("nan"),) if seed % 2 else ())
            )
            for part in range(4)
        )
        for index, size in enumerate(sizes)
    ]
    parameters, gradients, means, squares = (list(column) for column in zip(*filled, strict=True))
    copies = [torch.full_like(parameter, 7, dtype=copy) for parameter in parameters] if copy else []
    gradients = [gradient.to(dtype) for gradient in gradients]
    return Arrays(parameters, gradients, means, [square.abs() for square in squares], copies)


def edge_arrays(dtype: torch.dtype, copy: torch.dtype | None = None) -> Arrays:
    """All combinations of the extreme values as parameter, gradient, mean and square."""
    values = torch.tensor(EDGES)
    grid = list(torch.meshgrid(values, values, values, values.abs(), indexing="ij"))
    grid[1] = grid[1].to(dtype)
    flat = [axis.flatten().contiguous() for axis in grid]
    copies = [torch.full_like(flat[0], 7, dtype=copy)] if copy else []
    return Arrays(*([tensor] for tensor in flat), copies)


def with_bf16_moments(arrays: Arrays) -> Arrays:
    """The same with moments in bf16."""
    means, squares = (
        [tensor.bfloat16() for tensor in two] for two in (arrays.means, arrays.squares)
    )
    return arrays._replace(means=means, squares=squares)


def copied(arrays: Arrays, device: str = "cpu", shifts: Sequence[int] = (0,) * 5) -> Arrays:
    """Copies on a device, each kind some elements behind the beginning of a piece of memory."""

    def copy(tensor: Tensor, shift: int) -> Tensor:
        memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=device)
        return memory[shift:].view(tensor.shape).copy_(tensor)

    pairs = zip(arrays, shifts, strict=True)
    return Arrays(*([copy(tensor, shift) for tensor in tensors] for tensors, shift in pairs))


def assert_same_bits(actual: Arrays, expected: Arrays) -> None:
    for name, tensors in expected._asdict().items():
        for tensor, expected_tensor in zip(getattr(actual, name), tensors, strict=True):
            assert torch.equal(bits_of(tensor.cpu()), bits_of(expected_tensor)), (
                name,
                expected_tensor.shape,
            )


def check_against_reference(
    kernel: Kernel, arrays: Arrays, factor: float | None, settings: AdamSettings,
    shifts: Sequence[int] = (0,) * 5,
) -> None:  # fmt: skip
    """A kernel on copies of `arrays` on its device gives what the reference gives on the CPU."""
    mine = copied(arrays, kernel.device, shifts)
    own = None if factor is None else torch.tensor(factor, device=kernel.device)
    kernel.run(mine, own, settings)
    lengths = tuple(map(len, arrays))
    assert_same_bits(mine, expected_arrays(Bits(*chain(*arrays)), lengths, factor, settings))


@lru_cache(KEPT)
def expected_arrays(
    tensors: Bits, lengths: tuple[int, ...], factor: float | None, settings: AdamSettings
) -> Arrays:
    """What the reference makes of arrays of these lengths, kept for the next instruction set."""
    each = iter(tensors.tensors)
    arrays = Arrays(*([tensor.clone() for tensor in islice(each, length)] for length in lengths))
    reference(arrays, None if factor is None else torch.tensor(factor), settings.scalars())
    return arrays
