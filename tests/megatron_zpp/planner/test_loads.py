"""The messages of units and of axes add up to the forecast; what steps wait for adds up to them."""

import json
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from megatron_zpp.planner.parts.planned_run import Places
from megatron_zpp.planner.run_forecast import RunForecast, StepTime
from megatron_zpp.planner.step_work import IN_LAYER, load_of, stage_loads, unit_loads
from megatron_zpp.planner.timing.hardware import TYPICAL, find_cluster
from megatron_zpp.planner.timing.links import Load
from megatron_zpp.settings.arguments import parse
from tests.megatron_zpp.parallel.flags import CP2, GATHERED, PP2, SP, TP2, TP4, TWO_STAGES
from zeropp.wire.rank_group import EXCHANGE, Nodes, everyone
from zeropp.wire.traffic import HOPS, PURPOSES

SHAPE = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 511 "
    "--micro-batch-size 1 --global-batch-size 64 --num-query-groups 4 "
)
VOCABULARY = 512
ALL = {
    "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 4
}  # fmt: skip
SETTINGS = (
    ({"stage": 0}, {}),
    ({"stage": 1}, {}),
    ({"stage": 2, "zero_quantized_gradients": True}, {}),
    ({"stage": 3}, {}),
    ({"stage": 3, **ALL}, {}),
    ({"stage": 3, **ALL}, {"weight_steps": True, "code_messages": True}),
    ({"stage": 3, **ALL}, {"reduce_gradients_once": True}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {}),
)
AXES = (
    TP2, TP4 + SP, TP4 + SP + "--recompute-granularity full", CP2 + TP2,
    CP2 + GATHERED + "--recompute-granularity selective", PP2 + TP2 + SP, PP2 + TWO_STAGES,
)  # fmt: skip
CASES = [
    *(f"--deepspeed-config {json.dumps(dict(zero_optimization=zero, zeropp=zeropp))}"
      .replace(": ", ":").replace(", ", ",") for zero, zeropp in SETTINGS),
    *AXES,
]  # fmt: skip


def places(flags: str) -> Places:
    stage = "" if "--deepspeed-config" in flags else "--zero-stage 3"
    config = parse(f"{SHAPE} {stage} {flags}".split(), 16)
    return RunForecast.of(config, VOCABULARY, Nodes.of(range(16), 4), is_cpu=False).places


@pytest.mark.parametrize("flags", CASES)
def test_messages_add_up_to_the_forecast(flags: str) -> None:
    for run, _ in places(flags):
        count, sent = run.num_micro_batches, []
        for unit in run.units:
            first, later, backward, reduction, early = unit_loads(run.plan, unit.parts).values()
            sent += (1, first), (count - 1, later), (count, backward)
            sent += (1, reduction), (count - 1, early)
        node = run.sent_by_node()
        require_sums(sent, {hop: sum(node[each, hop] for each in PURPOSES) for hop in HOPS})
        sent = [(1, [load_of(each, run.ranks) for each in run.step_messages()])]
        for stage in run.stages:
            for (where, _), loads in stage_loads(run, stage).items():
                sent.append((count * (len(stage.layers) if where == IN_LAYER else 1), loads))
        axes = ("tensor", "context", "pipeline")
        require_sums(sent, {hop: sum(node[axis, hop] for axis in axes) for hop in HOPS})


def require_sums(sent: Iterable[tuple[float, Iterable[Load]]], expected: dict[str, float]) -> None:
    """Require what loads, each so many times, add up to: bytes of a node."""
    loads = [(times * each.times, each) for times, loads in sent for each in loads]
    near, far = (sum(n * getattr(each, f"{kind}_bytes") for n, each in loads)
                 for kind in ("near", "far"))  # fmt: skip
    assert 4 * near == pytest.approx(expected["in_node"], rel=1e-9)
    assert far == pytest.approx(expected["across_nodes"], rel=1e-9)


def time_of(flags: str, **described: object) -> StepTime:
    described = {"cluster": "dgx-a100", "num_nodes": 4, "gpus_per_node": 4, **described}
    cluster = find_cluster(**{"link": "25gbit", **described})
    return RunForecast(places(flags)).time(cluster)


@pytest.mark.parametrize("flags", CASES)
def test_the_parts_of_a_step_are_all_of_it(flags: str) -> None:
    time = time_of(flags, link="1gbit")
    parts = time.computing + time.bubble + time.across_nodes + time.in_node + time.kernels
    assert parts == pytest.approx(time.typical)
    assert time.fastest <= time.typical <= time.slowest
    assert (time.bubble > 0) == (PP2 in flags)
    assert time.across_nodes > 0  # the link is slow


def test_tensor_ranks_of_a_node_wait_for_it_and_not_for_the_links_between_nodes() -> None:
    slow, fast = time_of(TP4 + SP, node_bandwidth=1), time_of(TP4 + SP, node_bandwidth=1000)
    assert slow.in_node > 3 * fast.in_node
    assert time_of(TP4 + "--zero-stage 1").across_nodes < time_of("").across_nodes


def test_context_ranks_in_different_nodes_send_across_them() -> None:
    in_node, across = CP2, CP2 + TP4  # tensor ranks are fastest in the mesh, and fill a node
    one, other = (places(flags)[0][0].sent_by_node() for flags in (in_node, across))
    assert one["context", "across_nodes"] == 0 < one["context", "in_node"]
    assert other["context", "in_node"] == 0 < other["context", "across_nodes"]


def test_a_pipeline_of_more_micro_batches_waits_less() -> None:
    few = time_of(PP2 + "--zero-stage 1")
    many = time_of(PP2 + "--zero-stage 1 --global-batch-size 512")
    assert few.bubble / few.computing > 4 * many.bubble / many.computing
    two = time_of(PP2 + TWO_STAGES + "--zero-stage 1")
    assert two.bubble < 0.8 * few.bubble  # the last stage has the output layer too


def test_what_capabilities_send_in_a_step_is_waited_for() -> None:
    cluster = find_cluster(cluster="dgx-a100", num_nodes=4, gpus_per_node=4, link="25gbit")
    ((run, _),), without = places(""), RunForecast(places("")).typical(cluster)
    message = everyone(run.ranks.nodes, 0).message(EXCHANGE, 10**6)
    vars(run)["capabilities"] = (SimpleNamespace(messages=lambda _: [message]),)
    waiting = load_of(message, run.ranks).seconds(cluster.at(TYPICAL, run.compute_dtype))
    assert RunForecast([(run, 1)]).typical(cluster) - without == pytest.approx(waiting) and waiting
