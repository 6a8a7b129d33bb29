"""Messages of tensor, context and pipeline parallelism have the bytes of the forecast."""

import pytest

from megatron_zpp.planner.node_traffic import gradient_messages, node_of
from megatron_zpp.planner.parts.planned_run import plan_places
from megatron_zpp.planner.timing.axis_messages import IN_LAYER, load_of, stage_messages
from megatron_zpp.planner.timing.hardware import Description, find_cluster
from megatron_zpp.planner.timing.step_time import step_time
from megatron_zpp.planner.timing.unit_work import StepWork
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, PP2, SP, TP2, TP4, TWO_STAGES
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


@pytest.mark.parametrize("flags", CASES)
def test_messages_add_up_to_the_forecast(flags):
    for run, _ in places(flags):
        near = far = 0.0
        count = run.num_micro_batches
        sent = [(1, [load_of(each, run.ranks) for each in gradient_messages(run)])]
        for stage in run.stages:
            for (where, _), loads in stage_messages(run, stage).items():
                sent.append((count * (len(stage.layers) if where == IN_LAYER else 1), loads))
        for times, loads in sent:
            near += times * sum(each.times * each.near_bytes for each in loads)
            far += times * sum(each.times * each.far_bytes for each in loads)
        node = node_of(run)
        expected = {
            hop: sum(node[axis, hop] for axis in ("tensor", "context", "pipeline")) for hop in HOPS
        }
        assert 4 * near == pytest.approx(expected["in_node"])
        assert far == pytest.approx(expected["across_nodes"])
        assert near + far > 0


def seconds(flags, link="25gbit", **described):
    described = {"cluster": "dgx-a100", "num_nodes": 4, "gpus_per_node": 4, **described}
    cluster = find_cluster(Description(link=link, **described))
    return step_time(StepWork(places(flags), VOCABULARY), cluster)


@pytest.mark.parametrize("flags", CASES)
def test_the_parts_of_a_step_are_all_of_it(flags):
    time = seconds(flags)
    parts = time.computing + time.bubble + time.across_nodes + time.in_node + time.kernels
    assert parts == pytest.approx(time.typical)
    assert time.fastest <= time.typical <= time.slowest
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
