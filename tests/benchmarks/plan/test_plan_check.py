"""The check of the planner: what it replays and fits, and that its targets hold."""

import pytest

from benchmarks.plan import emulated_cluster, published_runs, sdp4bit, zeropp_figures
from benchmarks.plan.cells import (
    Bounds,
    CheckedSet,
    Prediction,
    fit,
    median_and_largest,
    read_cells,
    summary_rows,
)
from benchmarks.plan.deepspeed_fetches import fetches
from benchmarks.plan.plan_check import as_json, draw, show


def test_a_narrow_model_is_fetched_twice_and_a_wide_one_more():
    """Three passes need each weight; the recomputed one is still there for the backward hooks."""
    narrow, wide = fetches(40, 6144), fetches(40, 16384)
    assert narrow.forward + narrow.backward == pytest.approx(2.0, abs=2 / 40)
    assert wide.forward + wide.backward == pytest.approx(3.0, abs=0.5)
    tiny = fetches(4, 64)  # all weights stay within the limits
    assert tiny.forward + tiny.backward == pytest.approx(1.0)


def test_a_fit_finds_its_minimum_and_says_where_a_limit_decided():
    bounds = [
        Bounds("a", 0.1, 10, ("too low", "too high")), Bounds("b", 0.5, 2, ("low", "the sky"))
    ]  # fmt: skip
    (a, b), text = fit(lambda point: (point[0] - 3) ** 2 + (point[1] - 5) ** 2, bounds)
    assert a == pytest.approx(3, rel=1e-3) and b == pytest.approx(2)
    assert "AT ITS BOUND: the sky" in text and "too" not in text


def test_fitted_and_predicted_cells_are_never_in_one_average():
    cells = tuple(
        Prediction("x", "s", value, 1.0, is_fitted)
        for value, is_fitted in ((1.0, True), (1.5, False), (1.1, False))
    )
    checked = CheckedSet("n", "c", cells, (("s", 0.4, 0.45),))
    fitted, predicted = summary_rows([as_json(checked)])
    assert fitted[2:6] == ["fitted", "1", "0.0%", "0.0%"]
    assert predicted[2:] == ["predicted", "2", "30.0%", "50.0%", "40%, 45%: missed"]


@pytest.mark.parametrize(
    "checked", [zeropp_figures.check, lambda: sdp4bit.check(sdp4bit.SYSTEMS[0])]
)
def test_targets_are_met(checked):
    result = checked()
    assert result.targets
    for quantity, at_most, most in result.targets:
        median, largest = median_and_largest(
            p.error for p in result.predictions if p.quantity == quantity and not p.is_fitted
        )
        assert median <= at_most and largest <= most, (quantity, median, largest)


def test_published_runs_are_predicted_or_have_a_reason(tmp_path):
    checked, left_out = published_runs.check()[0], published_runs.left_out()
    assert len(checked.predictions) + left_out.total() == 123
    assert all(not p.is_fitted for p in checked.predictions)
    result = {
        "wrong_orders": [], "left_out": dict(left_out), "sets": [as_json(checked)],
    }  # fmt: skip
    text = show(result)
    assert "| published FSDP runs " in text and "FP8 products" in text
    pytest.importorskip("matplotlib")
    draw(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_on_the_emulated_cluster_fsdp2_computes_and_then_waits_for_three_times_the_model():
    """Two gathers and gloo's reduce-scatter of two rings each pass 3/4 of M from node to node."""
    cell = {"rate_mbit": "1", "micro_batches": "1"}
    fsdp2, ours = (emulated_cluster._work(name, 64, 1) for name in ("fsdp2", "zero3"))
    model = 2 * sum(unit.gathered // 2 for unit in fsdp2.run.units)
    gathers = sum(
        hop.far_bytes
        for unit in fsdp2.units
        for hop in (*unit["first_gather"], *unit["backward_gather"])
    )
    assert gathers == pytest.approx(1.5 * model, rel=0.02)  # the root is gathered once
    link = (gathers + 2 * gathers / 2) * emulated_cluster.HEADERS / emulated_cluster.MBIT
    free = emulated_cluster.ProcessorCost(copying=0.0, packets=0.0)
    assert fsdp2.seconds(cell, 2.0, free) == pytest.approx(2.0 + link, rel=0.02)
    assert ours.seconds(cell, 2.0, free) < 0.7 * link + 2.0
    assert fsdp2.limited_bytes(cell) == pytest.approx(2 * 2 * gathers, rel=0.02)


def test_work_on_the_cores_is_hidden_by_a_slow_link_but_not_by_a_fast_one():
    """Collectives that block leave the cores idle meanwhile; others take them from computation."""
    slow, unlimited = ({"rate_mbit": rate, "micro_batches": "1"} for rate in ("1", ""))
    fsdp2, ours = (emulated_cluster._work(name, 64, 1) for name in ("fsdp2", "zero3"))
    free, busy = (emulated_cluster.ProcessorCost(cost, cost) for cost in (0.0, 1.0))
    assert fsdp2.seconds(slow, 2.0, busy) == pytest.approx(fsdp2.seconds(slow, 2.0, free), rel=1e-3)
    assert fsdp2.seconds(unlimited, 2.0, busy) > fsdp2.seconds(unlimited, 2.0, free) == 2.0
    assert ours.seconds(slow, 2.0, busy) > ours.seconds(slow, 2.0, free)


def test_rows_in_another_order_are_named():
    numbers = {  # predicted of FSDP2 and of ZeRO++; measured are 3.1 and 0.9
        "fast": (3.0, 1.0), "slow": (1.0, 1.1), "no limit": (1.0, 1.1)
    }  # fmt: skip
    cells = tuple(
        Prediction(f"run 1, {row}, {name}", "s", predicted, measured)
        for row, pair in numbers.items()
        for name, predicted, measured in zip(("fsdp2", "zeropp"), pair, (3.1, 0.9), strict=True)
    )
    checked = CheckedSet("emulated cluster", "", cells)
    assert emulated_cluster.wrong_orders(checked) == ["run 1, slow"]


def test_megatrons_published_runs_are_cells_of_their_own():
    cells = [cell for cell in read_cells("public.tsv") if published_runs.is_megatron_run(cell)]
    assert len(cells) == 17
    assert {published_runs.why_not(cell) for cell in cells} == {"checked as Megatron-LM"}
    whole, selective = (published_runs.paper_run(cell) for cell in cells if cell["params"] == "22B")
    for each in (whole, selective):
        assert abs(each.error) < 0.15 and not each.is_fitted
    assert whole.predicted > selective.predicted


def test_runs_with_tensor_parallelism_are_predicted_where_it_is_waited_for():
    cells = [cell for cell in read_cells("public.tsv") if cell["tp"] == "8"]
    reasons = {
        cell["note"].split(",")[0]: published_runs.why_not(cell)
        for cell in cells
        if cell["precision"] == "bf16" and "torchtitan" in cell["source"]
    }
    assert reasons == {
        "vanilla TP": None, "async TP": "tensor parallelism beside products", "bf16": None
    }  # fmt: skip
