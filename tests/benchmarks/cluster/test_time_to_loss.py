"""Time to a held-out loss: what is compared, and bytes of interfaces beside those of the ledger."""

from pathlib import Path

import pytest

from benchmarks.cluster import time_to_loss
from benchmarks.cluster.time_to_loss import BENCHMARK, compare, draw, show
from tests.benchmarks.cluster.namespaces import needs_namespaces

TINY = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 300 "
    "--hidden-dropout 0"
)


def row(rate: str, variant: str, *losses: float) -> dict:
    return {
        "rate": rate, "variant": variant, "losses": [(20 * n, x) for n, x in enumerate(losses)],
        "seconds": [4.0 * n for n in range(len(losses))],
    }  # fmt: skip


def test_the_first_evaluation_that_is_not_above_the_loss_counts() -> None:
    rows = compare([row("a", "x", 9, 8, 7), row("a", "y", 9, 7, 6), row("b", "y", 9, 8, 8)], 7)
    assert [each["seconds_to_target"] for each in rows] == [8.0, 4.0, None]
    assert [each["speedup"] for each in rows] == [1.0, 2.0, None]


@needs_namespaces
def test_interfaces_count_what_nodes_that_step_alone_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--rate none --steps 20 --eval-interval 10 --eval-samples 16 --variants local-10"
    words = [*flags.split(), "--global-batch-size", "2", "--flags", TINY]
    monkeypatch.setattr("sys.argv", ["time_to_loss", *words])
    options, result = BENCHMARK.parse(), {}
    BENCHMARK.checked(options)
    time_to_loss.measure(options, result)
    (measured,) = result["rows"]
    assert measured["losses"][-1][1] < measured["losses"][0][1]
    # Headers of 66 bytes for each packet, acknowledgements, and the ranks' own rendezvous.
    assert measured["ledger"] < measured["wire"] < 1.2 * measured["ledger"]
    assert "local-10" in show(result)
    draw(result, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0
