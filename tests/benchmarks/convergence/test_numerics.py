"""The benchmark of numerics: it measures zeropp's format, and its page shows every number."""

from pathlib import Path

import pytest
import torch

from benchmarks.convergence.numerics import HOPS, error_statistics, one_hop, two_hops, verify
from benchmarks.convergence.numerics_chart import draw
from benchmarks.convergence.numerics_report import DATA, tables
from benchmarks.convergence.quantization_schemes import CODES, SCALES, Scheme, zeropp_round_trip
from zeropp.quant.packing import BLOCK, RowLayout


@pytest.fixture(scope="module")
def values() -> torch.Tensor:
    return torch.randn(4099, generator=torch.Generator().manual_seed(1)) * 1e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_the_model_of_the_format_is_the_format(values, bits):
    scheme = Scheme(bits=bits, block=BLOCK[bits])
    assert torch.equal(scheme.round_trip(values), zeropp_round_trip(values, bits))
    verify([values])
    layout = RowLayout(sizes=(1 << 15,), bits=(bits,), wire=torch.float32)
    assert scheme.bytes_per_element == layout.packed_bytes / (1 << 15)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("code", CODES)
def test_every_scheme_keeps_numbers_within_a_step_of_its_own(values, code, scale):
    scheme = Scheme(bits=8, block=64, code="clipped" if scale == "2^n" else code, scale=scale)
    result = scheme.round_trip(values)
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


@pytest.fixture(scope="module")
def result(values) -> dict:
    data = {name: [values, values[:70]] for name in DATA}
    return {
        "model": "--num-layers 1",
        "steps": 1, "loss": 2.5, "elements": {name: 4169 for name in DATA},
        "one_hop": [row for bits in (8, 4) for row in one_hop(bits, data)],
        "two_hops": [
            {"data": "gradients", **two_hops(bits, [[values[:4096]]] * 4)} for bits in HOPS
        ],
    }  # fmt: skip


def test_the_tables_hold_all_that_was_measured(result):
    rows = [[cell.strip() for cell in line.split("|")] for line in tables(result).splitlines()]
    assert sum(row[1:3] == ["**signed**", "**bf16**"] for row in rows) == 2 * 3  # in three tables
    widths = {row[1] for row in rows if len(row) > 1}
    assert all(f"{bits[0]}, {bits[1]}" in widths for bits in HOPS if bits != (8, 4))


def test_a_chart_is_drawn(result, tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_two_hops_of_equal_ranks_err_as_the_quantizations_do(values):
    values = values[:4096]
    rows = two_hops((8, 4), [[values]] * 4)
    assert rows["bits"] == (8, 4)
    assert rows["error"] > rows["expected"] * 1.2  # equal ranks, equal errors: they do not average
    assert two_hops((16, 16), [[values]] * 4)["error"] < 2**-8
