"""Bytes per node and step: what is counted, what is left out, how it is printed."""

from types import SimpleNamespace

import pytest
import torch

from megatron_zpp.monitor.communication import CommunicationMeter
from megatron_zpp.monitor.tensorboard import communication_scalars
from megatron_zpp.parallel.replicas import Replicas
from zeropp.capabilities.local_sgd.outer_group import PURPOSE as OUTER
from zeropp.wire.rank_group import AXES, Nodes
from zeropp.wire.traffic import HOPS, PURPOSES, Traffic

MIB = 2**20
FORWARD, GRADIENTS = ("weights_forward", "across_nodes"), ("gradients", "across_nodes")
NEAR = ("gradients", "in_node")


class TwoNodes:
    """The ranks of a job in which all others sent what this one sent: 2 nodes of 2."""

    num_ranks = data_parallel_size = 4
    replicas = Replicas()
    nodes = Nodes(num_ranks=4, ranks_per_node=2)
    activations = Traffic(AXES)

    def sum_over_replicas(self, *values: float) -> list[float]:
        return [4 * value for value in values]


def sharding(stage: int = 3, num_ranks: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        stage=stage,
        num_ranks=num_ranks,
        traffic=Traffic(),
        compute_dtype=torch.bfloat16,
        model=SimpleNamespace(part=SimpleNamespace(axes={})),
        plan=SimpleNamespace(units=(SimpleNamespace(wire_dtype=torch.bfloat16),)),
        expected_traffic=lambda num, typical=False: {FORWARD: MIB, GRADIENTS: num * MIB, NEAR: 0},
        plain_traffic=lambda num, **worlds: {FORWARD: 6 * num * MIB},
    )


def step(
    meter: CommunicationMeter, model: SimpleNamespace, num_micro_batches: int = 1, **sent: int
) -> None:
    meter.begin_step()
    for purpose, num_bytes in sent.items():
        model.traffic.add(purpose, {"across_nodes": num_bytes})
    meter.end_step(num_micro_batches, 1)


def test_the_mean_over_the_steps_of_an_interval_of_the_ranks_of_a_node():
    model = sharding()
    meter = CommunicationMeter(model, TwoNodes(), 1)
    step(meter, model, 1, weights_forward=MIB, gradients=MIB)
    step(meter, model, 3, gradients=3 * MIB)  # its weights had stayed in the nodes
    taken = meter.take()
    scalars = communication_scalars(taken)
    assert scalars["comm/weights_forward_across_nodes"] == 1 * MIB  # 2 ranks, every other step
    assert scalars["comm/gradients_across_nodes"] == 4 * MIB
    assert scalars["comm/across_nodes"] == 5 * MIB and scalars["comm/in_node"] == 0
    assert scalars["comm/expected_across_nodes"] == 6 * MIB
    assert set(scalars) == {f"comm/{a}_{b}" for a in PURPOSES for b in HOPS} | {
        "comm/across_nodes", "comm/in_node", "comm/expected_across_nodes",
    }  # fmt: skip
    assert taken.line() == (
        " comm per node and step (MiB) | across nodes: 5.00 (formula: 6.00) |"
        " weights forward: 1.00 (formula: 2.00) | weights backward: 0.00 | gradients: 4.00 |"
        " in node: 0.00 |"
    )
    assert meter.take() is None


def test_bits_of_coded_messages_are_those_of_an_interval():
    model = sharding()
    meter = CommunicationMeter(model, TwoNodes(), 1)
    for number in range(2):
        meter.begin_step()
        model.traffic.add("gradients", {"across_nodes": 1000})
        model.traffic.add_coded("weights_forward", 8000, 1000 * (1 + 2 * number))
        model.traffic.add_coded("gradients", 1000, 500)
        meter.end_step(1, 1)
    taken = meter.take()
    scalars = communication_scalars(taken)
    assert scalars["comm/bits_per_weight"] == 2 and scalars["comm/bits_per_gradient"] == 4
    assert "uncoded: " in taken.line()


def test_what_is_sent_between_steps_is_in_no_number():
    model = sharding()
    meter = CommunicationMeter(model, TwoNodes(), 1)
    step(meter, model, gradients=MIB)
    model.traffic.add("weights_forward", {"across_nodes": 99 * MIB})  # an evaluation
    step(meter, model, gradients=MIB)
    assert communication_scalars(meter.take())["comm/across_nodes"] == 2 * MIB
    model.traffic.add("weights_forward", {"across_nodes": 99 * MIB})
    assert meter.take() is None


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 4), (3, 1)])
def test_nothing_is_entered_where_no_collective_of_ours_runs(stage, num_ranks):
    model = sharding(stage, num_ranks)
    meter = CommunicationMeter(model, TwoNodes(), 1)
    step(meter, model)
    assert meter.take() is None and meter.summary_rows() == []


def test_the_ending_compares_all_steps_with_plain_zero():
    model = sharding()
    meter = CommunicationMeter(model, TwoNodes(), 1)
    for _ in range(3):
        step(meter, model, 256, weights_forward=MIB, gradients=512 * MIB)
        meter.take()
    step(meter, model, 256, weights_forward=MIB, gradients=512 * MIB)
    assert meter.summary_rows() == [
        ("between nodes", "1.00 GiB per node and step, 4.01 GiB in 4 steps"),
        (
            "plain ZeRO-3",
            "3.00 GiB per node and step: 3.0 times as much\n"
            "(by formula: bfloat16,\none ring over all ranks for each collective)",
        ),
    ]


def test_an_exchange_is_the_mean_over_the_steps_since_the_one_before():
    """What the lines say times their steps is what the ledger has counted."""
    model, outer, ranks = sharding(), Traffic((OUTER,)), TwoNodes()
    ranks.replicas = SimpleNamespace(
        count=1, index=0, ledger=outer, expected=lambda step: {(OUTER, "across_nodes"): MIB}
    )
    meter = CommunicationMeter(model, ranks, 1)
    lines = []
    for steps, exchanged in ((2, 0), (2, 0), (2, 3 * MIB), (2, MIB)):  # 2 ranks of a node
        for _ in range(steps):
            step(meter, model, 1, weights_forward=MIB, gradients=MIB)
        outer.add(OUTER, {"across_nodes": exchanged})
        lines.append(meter.take())
    assert [each.exchange and each.exchange.steps for each in lines] == [None, None, 6, 2]
    assert lines[0].line() == lines[1].line()
    assert lines[0].line() == (
        " comm per node and step (MiB) | across nodes: 4.00 | weights forward: 2.00 |"
        " weights backward: 0.00 | gradients: 2.00 | in node: 0.00 |"
    )
    assert lines[2].line() == (
        " comm per node and step (MiB) | across nodes: 5.00 (formula: 6.00) |"
        " weights forward: 2.00 | weights backward: 0.00 | gradients: 2.00 |"
        " outer: 1.00 (formula: 2.00) | in node: 0.00 |"
    )
    assert "| outer: 1.00 (formula: 2.00) |" in lines[3].line()
    scalars = [communication_scalars(each)["comm/outer_across_nodes"] for each in lines]
    assert scalars == [0, 0, 3 * MIB, MIB]
    ((_, between), _) = meter.summary_rows()
    assert between == "5.00 MiB per node and step, 40.0 MiB in 8 steps"
