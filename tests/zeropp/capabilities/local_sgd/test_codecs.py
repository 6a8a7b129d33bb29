"""Two bits for a number: their error, their bytes, and what is not finite."""

import pytest
import torch

from zeropp.capabilities.local_sgd.outer_mean import Codec
from zeropp.quant.coded_message import encode


def test_the_error_and_the_bytes_of_normal_numbers() -> None:
    row = torch.randn(2**18, generator=torch.Generator().manual_seed(0))
    each = Codec([len(row)], 2)
    packed = each.pack(row)
    error = (each.unpack(packed) - row).square().mean()
    assert error == pytest.approx(0.128, abs=0.003)
    assert len(packed) == each.packed_bytes == len(row) // 4 + len(row) // 64
    # 1.83 bits of entropy and 1/8 of scales, and at most 1% more.
    assert 8 * len(encode(packed)) / len(row) < 1.01 * (1.83 + 1 / 8)


def test_segments_are_packed_by_themselves() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [32, 0, 160, 256, 96]
    parts = [torch.randn(size, generator=generator) * 10**index for index, size in enumerate(sizes)]
    each = Codec(sizes, 2)
    together = each.unpack(each.pack(torch.cat(parts))).split(sizes)
    for part, size, own in zip(parts, sizes, together, strict=True):
        alone = Codec([size], 2)
        assert torch.equal(alone.unpack(alone.pack(part)), own)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    each = Codec([256], 2)
    assert not each.unpack(each.pack(torch.zeros(256))).any()
    for value in (float("inf"), float("nan")):
        row = torch.ones(256)
        row[200] = value
        values = each.unpack(each.pack(row))
        assert values[:128].isfinite().all() and not values[128:].isfinite().all()
