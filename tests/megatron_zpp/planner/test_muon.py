"""What the planner says of Muon: the bytes are the ledger's, the peak is that of real steps."""

from collections import Counter

import pytest

from megatron_zpp.planner.parts.planned_muon import OptimizerRound, seconds_of_rounds
from megatron_zpp.planner.timing.hardware import Protocol, Rates
from megatron_zpp.planner.timing.links import exchange
from tests.megatron_zpp.planner.searches import search_for
from tests.megatron_zpp.train.training_runs import with_json

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --swiglu "
    "--disable-bias-linear --micro-batch-size 1 --optimizer muon --train-iters 4 "
)
ZERO3 = {"stage": 3}


def test_the_plan_adds_what_muon_takes_to_the_time_of_adam() -> None:
    """Blocks of nodes send nothing across; whole matrices wait for the slow link."""
    flags = f"{MODEL} --vocab-size 511 --seq-length 128 --global-batch-size 16 "
    rows = {}
    for name in ("adam", "node", "whole"):
        chosen = with_json(ZERO3, muon_blocks=name)
        if name == "adam":
            chosen = "--optimizer adam --zero-stage 3"
        searched = search_for(flags + chosen, 512, link="1gbit")
        rows[name] = searched.row(searched.space.given)
    adam, node, whole = (rows[name] for name in ("adam", "node", "whole"))
    for row in (node, whole):
        assert row.time.typical - adam.time.typical == pytest.approx(row.time.optimizer)
        assert row.sent_in_m["in_node"] - adam.sent_in_m["in_node"] == pytest.approx(
            row.optimizer_in_m["in_node"]
        )
    assert node.optimizer_in_m["across_nodes"] == 0 < whole.optimizer_in_m["across_nodes"]
    assert whole.time.optimizer > node.time.optimizer > 0 == adam.time.optimizer


RATES = Rates(
    products=1e3,
    half_width=0.0,
    memory=1.0,
    near=10.0,
    far=1.0,
    protocols=(Protocol(start=0.0, near=0.0, far=0.0, share=1.0),),
)


def test_rounds_are_computed_while_others_are_on_their_way() -> None:
    """Rounds of 2 s on their way, each time, and of 5 s of the busiest of two ranks."""
    sides = (8, 8)
    work = Counter({sides: 5000}), Counter({sides: 3000})
    of_links = OptimizerRound(load=exchange(20.0, 0.0), work=work)
    assert seconds_of_rounds([of_links], RATES) == pytest.approx(2 + 5 + 2)
    assert seconds_of_rounds(3 * [of_links], RATES) == pytest.approx(2 + 3 * 5 + 2)
    slow = OptimizerRound(load=exchange(20.0, 8.0), work=work)
    # There, the second there, the first back, the second back: the link is never free.
    assert seconds_of_rounds(2 * [slow], RATES) == pytest.approx(4 * 8)
