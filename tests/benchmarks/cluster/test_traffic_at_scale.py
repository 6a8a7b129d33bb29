"""The bytes of a large cluster, counted for a model that takes a second."""

import json
import sys

import pytest

from benchmarks.cluster import traffic_at_scale
from benchmarks.cluster.traffic_at_scale import COMPONENTS

SMALL = "--nodes 3 --ranks-per-node 4 --layers 2 --hidden 256 --heads 4 --seq 8 --vocab 300 "


def run(flags: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["traffic_at_scale.py", *SMALL.split(), *flags])
        assert traffic_at_scale.BENCHMARK.main() == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("scale") / "scale.json"
    run(["--json", str(path)])
    return json.loads(path.read_text())


def test_every_ledger_is_the_formula(results):
    assert [row["name"] for row in results["rows"]] == list(COMPONENTS)
    for row in results["rows"]:
        assert row["ledger"] == row["forecast"]


def test_units_are_models_in_16_bit(results):
    """Rows of 300 words over 12 ranks and the small vectors are padded: hence 3%."""
    across = {row["name"]: row["ledger"]["across_nodes"] for row in results["rows"]}
    hop, ring = 2 / 3, 11 / 12  # of 3 nodes, of 12 ranks
    blocks = 2 * 12 * 256**2 / results["parameters"]  # the root is gathered once, not twice
    assert across["ZeRO-3"] == pytest.approx((1 + blocks) * ring + hop, rel=0.03)
    assert across["hpZ"] == pytest.approx(2 * hop, rel=0.03)
    assert across["qgZ"] == pytest.approx((1 + blocks) * ring + hop * 4.125 / 16, rel=0.03)
    assert across["all three"] == pytest.approx(hop * (8.0625 + 4.125) / 16, rel=0.05)


def test_some_rows_and_more_micro_batches(results, capsys):
    run(["--only", "all three", "--micro-batches", "3"])
    lines = capsys.readouterr().out.splitlines()
    lines = lines[3:]  # after the heading
    assert "3 nodes of 4 ranks; 3 micro-batch(es) per step" in lines[0]
    once = results["rows"][list(COMPONENTS).index("all three")]["ledger"]
    cells = [cell.strip() for cell in lines[-1].split("|")[1:-1]]
    assert cells[0] == "all three" and len(lines) == 6
    assert float(cells[1]) == pytest.approx(once["weights_forward across_nodes"], abs=1e-4)
    assert float(cells[3]) == pytest.approx(3 * once["gradients across_nodes"], abs=2e-4)
