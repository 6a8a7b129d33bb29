"""What messages add up to is the forecast, to the byte, and the parts of a step are all of it."""

import pytest

from megatron_zpp.planner.node_traffic import gradient_messages, node_of
from megatron_zpp.planner.parts.planned_run import plan_places, plan_run
from megatron_zpp.planner.timing.axis_messages import repeated, stage_messages
from megatron_zpp.planner.timing.hardware import Description, find_cluster
from megatron_zpp.planner.timing.step_time import step_time
from megatron_zpp.planner.timing.unit_work import RankWork, StepWork
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, PP2, SP, TP2, TP4, TWO_STAGES
from tests.megatron_zpp.train.training_runs import with_json
from zeropp.sharding.forecast import node_bytes
from zeropp.wire.rank_group import Nodes
from zeropp.wire.traffic import HOPS

SHAPE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 511 "
    "--zero-stage 3 --micro-batch-size 1 --global-batch-size 64 --num-query-groups 4 "
)
VOCABULARY = 512
CASES = (
    TP2, TP4 + SP, TP4 + SP + "--recompute-granularity full", CP2 + TP2,
    CP2 + GATHERED + "--recompute-granularity selective", PP2 + TP2 + SP, PP2 + TWO_STAGES,
)  # fmt: skip


def places(flags, num_ranks=16, per_node=4):
    config = parse((SHAPE + flags).split(), num_ranks)
    return plan_places(config, VOCABULARY, Nodes.of(range(num_ranks), per_node), is_cpu=False)


ALL = {
    "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 4
}  # fmt: skip
OF_ZERO = (
    ({"stage": 0}, {}),
    ({"stage": 1}, {}),
    ({"stage": 2, "zero_quantized_gradients": True}, {}),
    ({"stage": 3}, {}),
    ({"stage": 3, **ALL}, {}),
    ({"stage": 3, **ALL}, {"weight_steps": True, "code_messages": True}),
    ({"stage": 3, **ALL}, {"reduce_gradients_once": True}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {}),
)


def planned(zero, zeropp, num_micro_batches=3):
    """A small model on 16 ranks of 4 to a node."""
    flags = "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --bf16 "
    flags += "--tokenizer-type NullTokenizer --vocab-size 255 --micro-batch-size 1 "
    flags += f"--global-batch-size {16 * num_micro_batches} {with_json(zero, **zeropp)}"
    return plan_run(parse(flags.split(), 16), 256, Nodes.of(range(16), 4), is_cpu=False)


@pytest.mark.parametrize(("zero", "zeropp"), OF_ZERO)
def test_messages_of_units_add_up_to_the_forecast(zero, zeropp):
    run = planned(zero, zeropp)
    count = run.num_micro_batches
    assert count == 3
    near = far = 0.0
    for _, unit in RankWork(run, 256)._units[0]:
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
    time = step_time(StepWork([(run, 1)], 256), cluster_of("1gbit"))
    require_all_parts(time)
    assert time.bubble == 0 and time.across_nodes > 0  # the link is slow


@pytest.mark.parametrize("flags", CASES)
def test_messages_add_up_to_the_forecast(flags):
    for run, _ in places(flags):
        near = far = 0.0
        count = run.num_micro_batches
        sent_once = repeated(gradient_messages(run), run.ranks)
        for stage in run.stages:
            sent, in_layers = stage_messages(run, stage), count * len(stage.layers)
            for messages, times in (
                (sent.layer_forward, in_layers), (sent.layer_backward, in_layers),
                (sent.ends_forward, count), (sent.ends_backward, count), (sent.onward, count),
                (sent.back, count), (sent_once, 1 / len(run.stages)),
            ):  # fmt: skip
                near += times * sum(each.times * each.load.near_bytes for each in messages)
                far += times * sum(each.times * each.load.far_bytes for each in messages)
        node = node_of(run)
        expected = {
            hop: sum(node[axis, hop] for axis in ("tensor", "context", "pipeline")) for hop in HOPS
        }
        assert 4 * near == pytest.approx(expected["in_node"])
        assert far == pytest.approx(expected["across_nodes"])
        assert near + far > 0


def cluster_of(link="25gbit", **described):
    described = {"cluster": "dgx-a100", "num_nodes": 4, "gpus_per_node": 4, **described}
    return find_cluster(Description(link=link, **described))


def require_all_parts(time):
    parts = time.computing + time.bubble + time.across_nodes + time.in_node + time.kernels
    assert parts == pytest.approx(time.typical)
    assert time.fastest <= time.typical <= time.slowest


def seconds(flags, **described):
    return step_time(StepWork(places(flags), VOCABULARY), cluster_of(**described))


@pytest.mark.parametrize("flags", CASES)
def test_the_parts_of_a_step_are_all_of_it(flags):
    time = seconds(flags)
    require_all_parts(time)
    assert (time.bubble > 0) == (PP2 in flags)


def test_tensor_ranks_of_a_node_wait_for_it_and_not_for_the_links_between_nodes():
    slow, fast = seconds(TP4 + SP, node_bandwidth=1), seconds(TP4 + SP, node_bandwidth=1000)
    assert slow.in_node > 3 * fast.in_node
    assert seconds(TP4 + "--zero-stage 1").across_nodes < seconds("").across_nodes


def test_context_ranks_in_different_nodes_send_across_them():
    in_node, across = CP2, CP2 + TP4  # tensor ranks are fastest in the mesh, and fill a node
    run, other = places(in_node)[0][0], places(across)[0][0]
    assert node_of(run)["context", "across_nodes"] == 0 < node_of(run)["context", "in_node"]
    assert node_of(other)["context", "in_node"] == 0 < node_of(other)["context", "across_nodes"]


def test_a_pipeline_of_more_micro_batches_waits_less():
    few, many = seconds(PP2 + "--zero-stage 1"), seconds(
        PP2 + "--zero-stage 1 --global-batch-size 512"
    )  # fmt: skip
    assert few.bubble / few.computing > 4 * many.bubble / many.computing
    two = seconds(PP2 + TWO_STAGES + "--zero-stage 1")
    assert two.bubble < 0.8 * few.bubble  # the last stage has the output layer too
