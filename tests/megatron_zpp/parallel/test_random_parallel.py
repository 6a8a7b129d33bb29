"""Random models on random sizes of the axes print the losses and norms of one rank.

They stop on the way and go on with other ZeRO settings, on other nodes, and where other ranks have
the experts; what is quantized goes on with the same ones, to the last digit. Set RANDOM_PARALLEL to
draw more runs than the suite does.
"""

import os
from itertools import product
from pathlib import Path

import pytest

from tests.megatron_zpp.train.drawn_runs import (
    ALL_THREE,
    OF_FOUR,
    Drawn,
    require_no_digit_lost,
    require_numbers_of_one_rank,
)
from tests.megatron_zpp.train.training_runs import field, losses, run, with_json

RUNS = int(os.environ.get("RANDOM_PARALLEL", "2"))
# Of each kind the first seed; two from each are of most axes, stages and ways to share the work.
FIRST = {"dense": 16, "experts": 73, "muon": 44}
# Of axes of four ranks those whose data axis has two or more, a pipeline twice.
STEPPED = ((1, 1, 2), (1, 1, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1))
CODES = {"ranks_per_node": 1, "weight_steps": True, "code_messages": True}


@pytest.mark.parametrize(("kind", "seed"), [*product(FIRST, range(RUNS))])
def test_the_numbers_are_those_of_one_rank(kind: str, seed: int, tmp_path: Path) -> None:
    drawn = Drawn(FIRST[kind] + seed, kind)
    model = drawn.model + (drawn.losses_of_experts() if kind == "experts" else "")
    log, expected = require_numbers_of_one_rank(model, drawn.ranks, tmp_path)
    for name in ("load_balancing_loss", "seq_load_balancing_loss", "z_loss"):
        numbers, others = (list(map(float, field(each, name))) for each in (log, expected))
        assert numbers == pytest.approx(others, rel=1e-5), name
    assert drawn.experts or "(formula: " not in log  # of bytes, where it is not what was counted


@pytest.mark.parametrize("seed", range(RUNS))
def test_adapters_learn_what_they_do_on_one_rank(seed: int, tmp_path: Path) -> None:
    """Some of experts, beside weights that train for a step first; with a stop as above."""
    drawn = Drawn(2197 + seed, "experts")
    run(1, f"{drawn.model} --train-iters 1 --save {tmp_path}/base", tmp_path)
    flags = f"{drawn.model} {drawn.adapters(tmp_path / 'base')} --lr 1e-2"

    def ranks() -> str:
        kept = {"stage": 3, "zero_hpz_partition_size": 2}  # frozen weights in each node
        return drawn.ranks(drawn.draw.choice([kept, {"stage": 1}]), ranks_per_node=2)

    log, _ = require_numbers_of_one_rank(flags, ranks, tmp_path)
    assert len({*losses(log)}) == 3


@pytest.mark.parametrize(("kind", "seed"), [*product(FIRST, range(RUNS // 2))])
def test_with_zeropp_a_stop_changes_no_digit(kind: str, seed: int, tmp_path: Path) -> None:
    """Weights cross nodes as steps of codes; Muon has blocks of nodes, whole in some steps."""
    drawn = Drawn(1126 + FIRST[kind] + seed, kind, STEPPED if kind == "dense" else OF_FOUR)
    how = {
        "dense": drawn.ranks(ALL_THREE | {"zero_hpz_partition_size": 4}, **CODES),
        "experts": drawn.ranks(ALL_THREE | {"zero_hpz_partition_size": 2}, ranks_per_node=2),
        "muon": drawn.ranks(
            ALL_THREE | {"zero_hpz_partition_size": 2} if drawn.has_replicas else {"stage": 3},
            ranks_per_node=2, muon_blocks="node", muon_whole_every=3,
            weight_steps=drawn.has_replicas,
        ),
    }[kind]  # fmt: skip
    bf16 = "" if kind == "dense" else "--bf16"
    second = require_no_digit_lost(f"{drawn.model} {how} --lr 1e-2 {bf16}", tmp_path)
    assert "whole codes cross the nodes once more" not in second


def test_muon_goes_on_from_adamw_and_on_other_ranks(tmp_path: Path) -> None:
    """Momentum starts anew, with a line; on other ranks a line says why updates differ."""
    model = "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 3"
    flags = f"{model} --optimizer muon --load {tmp_path}/saved --save {tmp_path}/saved "
    flags += "--exit-interval 1 "
    run(1, f"{flags} --optimizer adam", tmp_path)
    first = run(1, flags, tmp_path)
    assert "of 8 parameters is reset: what was saved is another optimizer's" in first
    assert "optimizer is muon now, adam in the checkpoint: this changes the updates" in first
    changed = "--muon-num-ns-steps 4" + with_json(muon_whole_every=2)
    second = run(2, f"{flags} --zero-stage 3 {changed}", tmp_path)
    assert "muon_num_ns_steps is 4 now, 5 in the checkpoint: this changes the updates" in second
    changed = "muon_blocks node, muon_whole_every {}, ranks_per_node None on {} ranks".format
    assert f"{changed(2, 2)} now, {changed(None, 1)} in the checkpoint" in second
    assert len(losses(first) + losses(second)) == 2
