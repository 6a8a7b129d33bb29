"""Codes for blocks of numbers: the models are the formats, and what the pages compute is so."""

import pytest
import torch

pytest.importorskip("backports.zstd")

from benchmarks.codes import gradient_codes
from benchmarks.codes.block_codes import CODES, SCALES, Coded, candidates, verify, zeropp_round_trip
from benchmarks.codes.gradient_codes import (
    ZEROPP,
    coded_bits,
    figures,
    is_eligible,
    large_columns,
    with_large_columns,
    zeropp_codes,
)
from benchmarks.convergence import numerics
from benchmarks.convergence.numerics import DATA, HOPS, code_of, error_statistics, two_hops
from benchmarks.shared.interleaved import Disagreement
from zeropp.quant.packing import RowLayout


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    return torch.randn(4099, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.fixture(scope="module")
def matrix() -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_the_model_of_the_format_is_the_format(values, bits):
    own = code_of(bits).round_trip(values).values
    assert torch.equal(own, zeropp_round_trip(values, bits))
    verify({"it": (code_of(bits), bits)}, [values])
    with pytest.raises(Disagreement, match="it: the ops and the model differ"):
        verify({"it": (code_of(bits, scale="fp32"), bits)}, [values])
    layout = RowLayout(sizes=(1 << 15,), bits=(bits,), wire=torch.float32)
    assert code_of(bits).bytes_per_element == layout.packed_bytes / (1 << 15)


def test_the_models_of_formats_of_gradients_are_the_formats(matrix):
    assert set(ZEROPP) == set(zeropp_codes())
    verify(zeropp_codes(), [matrix, with_large_columns(matrix)])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("code", CODES)
def test_every_code_keeps_numbers_within_a_step_of_its_own(values, code, scale):
    code = "clipped" if scale == "2^n" else code
    result = code_of(8, block=64, code=code, scale=scale).round_trip(values).values
    extreme = torch.cat([block.abs().amax().expand(len(block)) for block in values.split(64)])
    shrinkage = 0.05 if code == "shrunk" else 0.0
    assert ((result - values).abs() <= (2 / 127 * 2 + shrinkage) * extreme).all()
    assert result.shape == values.shape and not torch.equal(result, values)


def test_a_power_of_two_is_never_too_small():
    scales = torch.tensor([1.0, 1.1, 0.5, 3.0, 0.0])
    assert SCALES["2^n"][1](scales).tolist() == [1.0, 2.0, 0.5, 4.0, 0.0]


def test_error_statistics_of_small_numbers():
    exact, results = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.zeros(2)]
    results.append(torch.tensor([2.0]))
    statistics = error_statistics(exact, results)
    assert statistics["error"] == pytest.approx((13 / 25) ** 0.5)
    assert statistics["gain"] == pytest.approx(8 / 25) and statistics["worst_gain"] == 0
    assert statistics["cosine"] == pytest.approx(8 / (5 * 2))


def test_two_hops_of_equal_ranks_err_as_the_quantizations_do(values):
    values = values[:4096]
    rows = two_hops((8, 4), [[values]] * 4)
    assert rows["bits"] == (8, 4)
    assert rows["error"] > rows["expected"] * 1.2  # equal ranks, equal errors: they do not average
    assert two_hops((16, 16), [[values]] * 4)["error"] < 2**-8


def test_coded_bits_of_codes_that_are_known():
    """One bit of entropy, and a scale of 16 bits for each of 64 blocks of 256 elements."""
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(2, (1 << 14,), generator=generator).float()
    coded, entropy = coded_bits([Coded(random, torch.zeros(1 << 14), 64)])
    assert entropy == 16 / 256 and coded < 0.1
    coded, entropy = coded_bits([Coded(random, random, 64)])
    assert entropy == pytest.approx(1 + 16 / 256, abs=0.001)
    assert entropy < coded < 1.5  # it looks for repetitions, too


def test_the_pages_show_every_code_and_what_zeropp_uses(values, matrix, tmp_path):
    large, enlarged = large_columns(), with_large_columns(matrix)
    assert large.sum() == 8 and torch.equal(enlarged[:, ~large], matrix[:, ~large])
    rows = [figures(code, [matrix], matrix, matrix.abs()) for code in candidates()]
    eligible = {row["code"] for row in rows if is_eligible(row)}
    assert "rotated INT4" in eligible and "INT4, blocks of 128" not in eligible
    page = {"model": "", "steps": (1,), "losses": [2.5], "elements": 1, "codes": rows}
    lines = [line for line in gradient_codes.show(page).splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(rows)
    assert sum(line.endswith(" yes |") for line in lines) == len(eligible)
    data = {name: [values, values[:70]] for name in DATA}
    result = {
        "model": "", "steps": 1, "loss": 2.5, "elements": dict.fromkeys(DATA, 4169),
        "one_hop": [row for bits in (8, 4) for row in numerics.one_hop(bits, data)],
        "two_hops": [{"data": "x", **two_hops(bits, [[values[:4096]]] * 4)} for bits in HOPS],
    }  # fmt: skip
    cells = [[c.strip() for c in line.split("|")] for line in numerics.show(result).splitlines()]
    assert sum(row[1:3] == ["**signed**", "**bf16**"] for row in cells) == 2 * 3  # in three tables
    assert {"**8, 4**", "4, 4", "8, 8"} < {row[1] for row in cells if len(row) > 1}
    pytest.importorskip("matplotlib")
    numerics.draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
