"""What the units' messages add up to is the forecast, to the byte."""

import json

import pytest

from megatron_zpp.planner.parts.planned_run import plan_run
from megatron_zpp.planner.timing.hardware import Description, find_cluster
from megatron_zpp.planner.timing.messages import unit_messages
from megatron_zpp.planner.timing.step_time import step_time
from megatron_zpp.planner.timing.unit_work import StepWork
from megatron_zpp.settings.arguments import parse
from zeropp.sharding.forecast import node_bytes
from zeropp.wire.rank_group import Nodes
from zeropp.wire.traffic import HOPS

SHAPE = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 1 "
)
ALL = {
    "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 4
}  # fmt: skip
CASES = (
    ({"stage": 0}, {}),
    ({"stage": 1}, {}),
    ({"stage": 2, "zero_quantized_gradients": True}, {}),
    ({"stage": 3}, {}),
    ({"stage": 3, **ALL}, {}),
    ({"stage": 3, **ALL}, {"weight_steps": True, "code_messages": True}),
    ({"stage": 3, **ALL}, {"reduce_gradients_once": True}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {}),
)


def planned(zero, zeropp, path, num_micro_batches=3):
    file = path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": zero, "zeropp": zeropp}))
    batch = 16 * num_micro_batches
    flags = f"{SHAPE}--global-batch-size {batch} --deepspeed-config {file}"
    return plan_run(parse(flags.split(), 16), 256, Nodes.of(range(16), 4), is_cpu=False)


@pytest.mark.parametrize(("zero", "zeropp"), CASES)
def test_messages_add_up_to_the_forecast(zero, zeropp, tmp_path):
    run = planned(zero, zeropp, tmp_path)
    count = run.num_micro_batches
    assert count == 3
    near = far = 0.0
    for planned_unit in run.units:
        unit = unit_messages(run.plan, planned_unit.parts)
        for messages, times in (
            (unit.first_gather, 1), (unit.later_gather, count - 1), (unit.backward_gather, count),
            (unit.reduction, 1), (unit.early_reduction, count - 1),
        ):  # fmt: skip
            near += times * sum(each.near_bytes for each in messages)
            far += times * sum(each.far_bytes for each in messages)
    sent = node_bytes(run.plan, count, typical=True)
    total = {hop: sum(sent[key] for key in sent if key[1] == hop) for hop in HOPS}
    assert 4 * near == pytest.approx(total["in_node"], rel=1e-12)
    assert far == pytest.approx(total["across_nodes"], rel=1e-12)


@pytest.mark.parametrize(("zero", "zeropp"), CASES)
def test_the_parts_of_a_step_are_all_of_it(zero, zeropp, tmp_path):
    cluster = find_cluster(
        Description(cluster="dgx-a100", num_nodes=4, gpus_per_node=4, link="1gbit")
    )
    time = step_time(StepWork([(planned(zero, zeropp, tmp_path), 1)], 256), cluster)
    parts = time.computing + time.across_nodes + time.in_node + time.kernels
    assert parts == pytest.approx(time.typical)
    assert time.fastest <= time.typical <= time.slowest
    assert time.across_nodes > 0  # the link is slow
