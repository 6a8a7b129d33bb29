"""The orthogonal matrix next to a given one, by Newton-Schulz iterations.

Each iteration takes the singular values s of X to a s + b s³ + c s⁵ and keeps the singular vectors.
Few of them bring all but the smallest close to 1. Sources: Jordan et al. 2024, Muon; Bernstein and
Newhouse 2024, arXiv:2409.20325; the sets of coefficients have sources of their own.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from zeropp.capabilities.muon.settings import COEFFICIENT_TYPES

Coefficients = tuple[float, float, float]
JORDAN: Coefficients = (3.4445, -4.7750, 2.0315)
QUINTIC = (  # Cesista 2025, for five iterations
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS = (  # Amsel et al. 2025, arXiv:2505.16932; the last one is repeated
    (7.2086, -15.5131, 9.0178),
    (3.9623, -2.5813, 0.4542),
    (3.9466, -2.5765, 0.4544),
    (3.8991, -2.5671, 0.4566),
    (3.7186, -2.5308, 0.4653),
    (3.1390, -2.3073, 0.4733),
    (2.1715, -1.5246, 0.3885),
    (1.8648, -1.2224, 0.3577),
)
SETS = MappingProxyType(
    dict(zip(COEFFICIENT_TYPES, ((JORDAN,), QUINTIC, POLAR_EXPRESS), strict=True))
)


class MatrixSplit(NamedTuple):
    """How ranks of another axis hold parts of a matrix: it is split in dimension `dim`."""

    group: dist.ProcessGroup
    dim: int
    is_gathered: bool  # each computes the whole matrix, instead of a term of its products
    rows: tuple[int, ...] = ()  # of each rank, if their numbers differ


def coefficients_of(name: str, steps: int) -> tuple[Coefficients, ...]:
    """Return the coefficients of each of `steps` iterations of a set of `SETS`."""
    numbers = SETS[name]
    if name == "polar_express" and steps > len(numbers):
        return (*numbers, *(numbers[-1:] * (steps - len(numbers))))
    return tuple(islice(cycle(numbers), steps))


def orthogonalize(
    matrix: Tensor,
    coefficients: Sequence[Coefficients],
    eps: float = 1e-7,
    split: MatrixSplit | None = None,
) -> Tensor:
    """Return a matrix [m, n] with the singular vectors of `matrix`, its singular values about 1.

    It is computed in the dtype of `matrix`, with m ≤ n or as its transpose. A matrix of zeros stays
    one. Several of one shape, [k, m, n], are each taken by itself, in fewer calls. With `split`,
    `matrix`, [m, n], is this rank's part, and so is the result.
    """
    if split is not None:
        return _with_peers(matrix, coefficients, eps, split)
    product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for a, b, c in coefficients:
        gram = x @ x.mT
        polynomial = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _with_peers(
    matrix: Tensor, coefficients: Sequence[Coefficients], eps: float, split: MatrixSplit
) -> Tensor:
    group, dim = split.group, split.dim
    if split.is_gathered:
        sizes = split.rows or (matrix.shape[dim],) * group.size()
        padded = F.pad(matrix, (0, 0, 0, max(sizes) - len(matrix))) if split.rows else matrix
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded.contiguous(), group=group)
        own = (part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True))
        whole = orthogonalize(torch.cat([*own], dim=dim), coefficients, eps)
        return whole.split(sizes, dim=dim)[group.rank()]
    x = matrix.T if dim == 0 else matrix  # now its columns are split: products of rows are sums
    square = x.float().square().sum()
    dist.all_reduce(square, group=group)
    x = x / square.sqrt().clamp(min=eps).to(x.dtype)
    for a, b, c in coefficients:
        gram = (x @ x.T).float()
        dist.all_reduce(gram, group=group)
        gram = gram.to(x.dtype)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if dim == 0 else x


def scale(shape: tuple[int, int], mode: str) -> float:
    """Return what an orthogonalized matrix of `shape` (rows, columns) is multiplied by.

    mode: `spectral`, √max(rows, columns), with which the elements' root mean square is 1 and, times
    0.2, Adam's (Liu et al. 2025, Moonlight, section 2.2); `unit_rms_norm`, √(rows / columns);
    `shape_scaling`, the same but at least 1.
    """
    rows, columns = shape
    ratio = {
        "spectral": max(rows, columns),
        "unit_rms_norm": rows / columns,
        "shape_scaling": max(1.0, rows / columns),
    }[mode]
    return float(ratio) ** 0.5


def flops(rows: int, columns: int, steps: int = 5) -> int:
    """Return the operations of `orthogonalize` on one matrix, a multiplication and a sum each."""
    m, n = sorted((rows, columns))
    return steps * (4 * m * m * n + 2 * m**3)
