"""Whether messages are coded is tried where machines differ, and agreed on by all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh
from zeropp.settings.zero_config import ZeroConfig
from zeropp.wire.coding_choice import CodingTrials
from zeropp.wire.rank_group import Nodes
from zeropp.wire.route import Route, gradient_route, weight_route
from zeropp.wire.traffic import Coding

AXIS = (0, 1, 2, 3)
CHOICES = (True, 1, (True, False)), (None, 1, (False, False)), (None, 2, (True, True))


@ranks(4)
def test_steps_of_training_choose_again_as_links_change():
    """Some ranks lose more time than others; all choose the same, and trials cost little."""
    codings, clock = [Coding(), Coding(True)], [0.0]
    weights = torch.nn.Parameter(distribute_tensor(torch.ones(4), data_mesh()))
    optimizer = torch.optim.SGD([weights])
    trials = CodingTrials(AXIS, codings, torch.device("cpu"))
    trials._now = lambda: clock[0]
    for best, others in (True, (1.0, 0.2)), (False, (0.06, 0.04)), (True, (3.0, 0.06)):
        for lasting in (400, 1000):
            begin = clock[0]
            for _ in range(lasting):
                optimizer.step()
                torch.optim.SGD([torch.ones(1)]).step()  # which ranks may do alone
                costs = zip(others, codings, strict=True)
                lost = sum(cost for cost, coding in costs if coding.is_on is not best)
                trials.begin_pass()
                clock[0] += 1 + lost * (dist.get_rank() + 1) / 2.5
                trials.end_pass()
                clock[0] += 50 * (dist.get_rank() % 2)
                trials.end_pass()  # of another micro-batch
        assert [each.is_on for each in codings] == [best, best]
        assert clock[0] - begin < (1.02 + 50 * (dist.get_rank() % 2)) * lasting


@pytest.mark.parametrize(("coded", "machines", "expected"), CHOICES)
def test_only_what_is_quantized_is_coded_and_tried_between_machines(coded, machines, expected):
    config = ZeroConfig.from_json({"zeropp": {"code_messages": coded}})
    nodes = Nodes(num_ranks=4, ranks_per_node=2, machines=machines)
    assert weight_route(config, nodes).is_coded is gradient_route(config, nodes).is_coded is False
    coding = Route(nodes=nodes, inner=2, is_coded=coded).coding
    assert (coding.is_on, coding.is_tried) == expected
