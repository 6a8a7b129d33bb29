"""What ranks send when they update the weights, counted and by formula, in runs."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_zpp.monitor.communication import Communication
from megatron_zpp.train.inputs import TRAIN
from megatron_zpp.train.run import Run
from tests.megatron_zpp.train.training_runs import built_run, run_alone, shared_folder, with_json
from tests.ranks import ranks
from tests.worlds import worlds

BATCH = "--micro-batch-size 1 --global-batch-size 4 --log-interval 100 "
OUTER = "outer", "across_nodes"


def steps(run: Run, number: int) -> Communication:
    """Train for some steps, and return what a node has sent."""
    with run.batches.loader(TRAIN, 0, ()) as batches:
        for _ in range(number):
            run.trainer.step(batches).result()
    return run.trainer.communication.take()


def flags_of(stage: int, **zeropp: object) -> str:
    return BATCH + with_json({"stage": stage}, ranks_per_node=2, **zeropp)


@pytest.mark.parametrize(("bits", "stage"), [(32, 3), (8, 1), (4, 0)])
@ranks(4, timeout=120)
def test_an_exchange_is_counted_once_for_the_steps_before_it(bits, stage, tmp_path):
    zeropp = {"sync_every": 3, "sync_bits": bits}
    flags = flags_of(stage, **zeropp) + "--train-iters 7"
    with (
        worlds(2, shared_folder(str(tmp_path))) as outer,
        built_run(flags, outer) as run,
    ):
        taken, trained = steps(run, 6), run.trainer.sharding.model.num_parameters()
        rank = dist.get_rank() + 2 * outer.node
    sent, expected = taken.sent[OUTER], taken.expected[OUTER]
    assert taken.sent["outer", "in_node"] == 0
    # Twice, half of all weights go to the other node, and half come back.
    per_weight = {32: 4, 8: 1 + 2 / 256, 4: 0.5 + 2 / 128}[bits]
    assert expected == pytest.approx(2 * trained * per_weight, rel=0.05), rank  # padding
    if bits == 32:
        assert sent == pytest.approx(expected, rel=1e-12)
    else:
        assert 0 < sent != expected and sent < 1.02 * expected
    # Plain ZeRO's rings over all 4 ranks send 16 bit, here 32, in each of 6 steps.
    plain = sum(taken.plain[key] for key in taken.plain if key[1] == "across_nodes")
    collectives = {0: 0, 1: 2, 3: 3}[stage]
    if stage != 3:  # whose root is gathered once
        assert plain == pytest.approx(6 * collectives * 4 * trained * 3 / 4, rel=0.05)


def test_the_table_and_the_end_say_what_nodes_exchange(tmp_path: Path) -> None:
    zeropp = {"sync_every": {"0": 1, "2": 2}, "sync_on_host": True}
    flags = flags_of(1, **zeropp) + "--train-iters 4 --log-interval 2"
    log = run_alone(4, 2, flags, tmp_path)
    assert re.search(
        r"nodes +2 that step alone, exchange every step, every 2 steps after step 2 in 4", log
    )
    assert re.search(r"\n +outer +0\.\d+ +0\.00\n", log), log
    assert len(re.findall(r"\| outer: 0\.\d\d", log)) == 2
    assert re.search(r"plain ZeRO-1 +\S+ \S+ per node and step: \d", log)
