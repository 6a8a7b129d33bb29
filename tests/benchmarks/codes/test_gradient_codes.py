"""The benchmark of codes for gradients: it measures zeropp's formats, and what it says is so."""

import pytest
import torch

pytest.importorskip("backports.zstd")

from benchmarks.codes.gradient_codes import (
    ZEROPP,
    figures,
    is_eligible,
    large_columns,
    show,
    verify,
    with_large_columns,
)
from benchmarks.codes.schemes import Coded, candidates, coded_bits


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 1e-3


def test_the_models_of_zeropps_formats_are_those(matrix):
    codes = {code.name: code for code in candidates()}
    assert set(ZEROPP) <= set(codes)
    verify(codes, [matrix, with_large_columns(matrix)])


def test_every_code_keeps_numbers_within_their_blocks_largest(matrix):
    for code in candidates():
        result = code.round_trip(matrix)
        assert result.values.shape == matrix.shape and result.codes.numel() == matrix.numel()
        if code.scale != "rms":  # what is larger than its last code
            limit = matrix.abs().max() * (32 if code.is_rotated else 1)
            assert (result.values - matrix).abs().max() <= limit, code.name


def test_coded_bits_of_codes_that_are_known():
    """One bit of entropy, and a scale of 16 bits for each of 64 blocks of 256 elements."""
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(2, (1 << 14,), generator=generator).float()
    same = Coded(random, torch.zeros(1 << 14), 64)
    coded, entropy = coded_bits([same])
    assert entropy == 16 / 256 and coded < 0.1
    coded, entropy = coded_bits([Coded(random, random, 64)])
    assert entropy == pytest.approx(1 + 16 / 256, abs=0.001)
    assert entropy < coded < 1.5  # it looks for repetitions, too


def test_large_columns_are_a_few_and_only_they_grow(matrix):
    large = large_columns()
    enlarged = with_large_columns(matrix)
    assert large.sum() == 8
    assert torch.equal(enlarged[:, ~large], matrix[:, ~large])
    assert torch.equal(enlarged[:, large], matrix[:, large] * 30)


def test_the_page_shows_every_code_and_which_keep_the_gain(matrix):
    positive = matrix.abs()
    rows = [figures(code, [matrix], matrix, positive) for code in candidates()]
    eligible = {row["code"] for row in rows if is_eligible(row)}
    assert "rotated INT4" in eligible and "INT4, blocks of 128" not in eligible
    page = show({"model": "", "steps": (1,), "losses": [2.5], "elements": 1, "codes": rows})
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(rows)
    assert sum(line.endswith(" yes |") for line in lines) == len(eligible)
