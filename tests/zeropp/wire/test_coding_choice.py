"""Whether messages are coded is measured where machines differ, and agreed on by all ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire import coding_choice
from zeropp.wire.coding_choice import with_choice
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import Route, gradient_route, weight_route

AXIS = (0, 1, 2, 3)
NODES = Nodes(num_ranks=4, ranks_per_node=2, machines=2)


def route_of(coded: object, purpose: str = "weights") -> Route:
    config = ZeroConfig.from_json(
        {
            "zero_optimization": {
                "stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 2,
                "zero_quantized_gradients": True,
            },
            "zeropp": {"weight_steps": True, "code_messages": coded},
        }
    )  # fmt: skip
    return {"weights": weight_route, "gradients": gradient_route}[purpose](config, NODES)


@pytest.mark.parametrize("purpose", ["weights", "gradients"])
@pytest.mark.parametrize(("slow_ranks", "is_coded"), [((0,), True), ((), False)])
@ranks(4)
def test_all_ranks_make_one_choice(purpose, slow_ranks, is_coded):
    """What the ranks measure is added up: one slow link decides for all."""
    seconds = {True: 1000.0, False: 1e-9}[dist.get_rank() in slow_ranks]
    real, calls = coding_choice._seconds, []

    def measured(action) -> float:
        calls.append(real(action))
        return seconds if len(calls) == 1 else 1.0

    coding_choice._seconds = measured
    try:
        route = with_choice(
            route_of("auto", purpose), purpose, AXIS, dist.get_rank(), torch.device("cpu")
        )
    finally:
        coding_choice._seconds = real
    assert route.is_coded is is_coded and len(calls) == 2 and min(calls) > 0


@pytest.mark.parametrize("coded", [True, False])
def test_a_choice_that_was_made_is_kept(coded):
    route = route_of(coded)
    assert with_choice(route, "weights", AXIS, 0, torch.device("cpu")) is route


def test_only_what_is_quantized_is_coded():
    config = ZeroConfig.from_json({"zeropp": {"code_messages": True}})
    assert weight_route(config, NODES).is_coded is gradient_route(config, NODES).is_coded is False
    assert replace(route_of(True), bits=(8, 8)).is_coded
