"""Weights in MXFP4, as gpt-oss is released, decoded as they are read.

A block is 32 numbers of 4 bits (e2m1: a sign, two bits of exponent, one of mantissa) with a common
power of two, a byte (e8m0: the exponent plus 127; 255 is NaN). A byte of numbers has the first of
two in its low bits. Files have them by outputs, and models by inputs: `X_blocks` [E, out, B, 16]
and `X_scales` [E, out, B] are the weight `X` [E, 32 B, out].
Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), sections 5.2 and 5.3.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.interchange.converted_weights import TensorFiles
from megatron_zpp.interchange.hf_config import quantization_of
from megatron_zpp.interchange.hf_folder import FolderTensors
from zeropp.errors import InputError, first_few

BLOCKS, SCALES = "_blocks", "_scales"
BYTES = 16  # of the numbers of a block
BIAS, NAN = 127, 255  # of exponents
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by exponent and mantissa


def tensors_of(folder: Path, content: Mapping[str, Any]) -> TensorFiles:
    """Return the tensors of a Hugging Face folder with this content of its config.json."""
    if quantization_of(content) is None:
        return FolderTensors(folder)
    return Mxfp4Tensors(FolderTensors(folder, packed=True))


class Mxfp4Tensors:
    """The tensors of a folder, of which those in MXFP4 have their names and shapes in 16 bit.

    Raises InputError for blocks without scales or scales without blocks, and if their types or
    shapes do not fit.
    """

    def __init__(self, tensors: FolderTensors) -> None:
        self._tensors, self.location = tensors, tensors.location
        facts = tensors.facts()
        self._packed = {name.removesuffix(BLOCKS) for name in facts if name.endswith(BLOCKS)}
        scaled = {name.removesuffix(SCALES) for name in facts if name.endswith(SCALES)}
        if alone := sorted(self._packed ^ scaled):
            raise InputError(
                f"{self.location}: {first_few(alone)}: of MXFP4 weights there are blocks without "
                "scales, or scales without blocks"
            )
        for name in sorted(self._packed):
            _check(f"{self.location}: {name}", facts[name + BLOCKS], facts[name + SCALES])

    def facts(self) -> dict[str, Tensor]:
        """Return every tensor's shape and dtype by name, as tensors on the meta device."""
        facts = self._tensors.facts()
        for name in self._packed:
            num, rows, blocks, _ = facts.pop(name + BLOCKS).shape
            facts.pop(name + SCALES)
            shape = (num, 2 * BYTES * blocks, rows)
            facts[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return facts

    def read(self, name: str) -> Tensor:
        """Return one whole tensor on the CPU; that of MXFP4 weights is exact in bfloat16.

        Raises InputError for scales that are NaN, and for weights beyond what bfloat16 holds.
        """
        if name not in self._packed:
            return self._tensors.read(name)
        blocks, scales = (self._tensors.read(name + end) for end in (BLOCKS, SCALES))
        if (scales == NAN).any():
            raise InputError(
                f"{self.location}: {name}{SCALES} holds {NAN}, which is NaN: the weights are "
                "unusable"
            )
        decoded = torch.stack([decode(*each) for each in zip(blocks, scales, strict=True)])
        if not decoded.isfinite().all():
            raise InputError(
                f"{self.location}: {name}{SCALES} makes weights infinite: they are unusable"
            )
        return decoded.transpose(1, 2)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., 32 B], bfloat16, of blocks [..., B, 16] and scales [..., B]."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)))
    indices = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    exponents = scales.int()[..., None] - BIAS
    return torch.ldexp(values[indices], exponents).bfloat16().flatten(-2)


def _check(what: str, blocks: Tensor, scales: Tensor) -> None:
    if any(each.dtype != torch.uint8 for each in (blocks, scales)):
        raise InputError(
            f"{what}: MXFP4 blocks and scales are {blocks.dtype} and {scales.dtype}; expected "
            "bytes (uint8)"
        )
    if blocks.ndim != 4 or blocks.shape[3] != BYTES or blocks.shape[:3] != scales.shape:
        raise InputError(
            f"{what}: MXFP4 blocks {list(blocks.shape)} and scales {list(scales.shape)}; expected "
            f"[matrices, outputs, blocks, {BYTES}] and [matrices, outputs, blocks]"
        )
