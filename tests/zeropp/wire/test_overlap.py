"""When collectives begin: gathers while the two blocks before compute, reductions while others do.

On a CPU nothing overlaps by itself, so the order in which hops begin is what makes overlap. The
ledger is told of each hop as it begins.
"""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharded_training import shard_on_nodes
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import Sharding, shard
from zeropp.fsdp_adapter import parameters

SHORT = {"weights_forward": "w", "weights_backward": "w", "gradients": "g"}


class EventModel(SmallModel):
    """A small model whose blocks record when they compute, in forward and in backward."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(3)
        for index, block in enumerate(self.blocks):
            block.norm.register_forward_hook(self.mark(events, index))

    @staticmethod
    def mark(events: list[str], index: int):
        def computed(module, arguments, output: torch.Tensor) -> None:
            events.append(f"forward {index}")
            if output.requires_grad:
                output.register_hook(lambda _: events.append(f"backward {index}"))

        return computed


def recorded_events(zero: dict, ranks_per_node: int) -> tuple[Sharding, list[str]]:
    """A sharded small model, and the list to which its events are appended."""
    torch.manual_seed(5)
    events: list[str] = []
    sharding = shard(EventModel(events), data_mesh(), zero_config(zero, ranks_per_node))
    entered = sharding.roots[0].traffic.add

    def add(purpose: str, by_hop: dict[str, int]) -> None:
        far = "across" if by_hop.get("across_nodes") else "near"
        events.append(f"{SHORT[purpose]} {far}")
        entered(purpose, by_hop)

    sharding.roots[0].traffic.add = add
    return sharding, events


# Two hops. The first hops of the next two units' gathers have begun when a unit computes; its own
# second hop begins where its weights are needed, while weights of others cross the nodes. In
# backward the weights are in the node; a reduction goes on by a hop when the next one begins.
TWO_HOPS = """
    w across, w near,
    w across, w across, w near, w across, forward 0,
    w near, forward 1,
    w near, forward 2,
    w near, w near, backward 2, g near,
    w near, backward 1, g near, g across,
    backward 0, g near, g across,
    g near, g across, g across
"""
ONE_HOP = """
    w near,
    w near, w near, w near, forward 0,
    forward 1,
    forward 2,
    w near, w near, backward 2, g near,
    w near, backward 1, g near,
    backward 0, g near,
    g near
"""


@pytest.mark.parametrize(
    ("zero", "ranks_per_node", "order"), [(ALL_THREE, 2, TWO_HOPS), ({"stage": 3}, 4, ONE_HOP)]
)
@ranks(4)
def test_each_gather_begins_before_the_two_blocks_before_compute(zero, ranks_per_node, order):
    """FSDP2: on a CPU all is serial by default."""
    sharding, events = recorded_events(zero, ranks_per_node)
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    assert events == [word.strip() for word in order.split(",")]


@ranks(4)
def test_every_hop_has_one_process_group_for_each_direction_whatever_the_blocks():
    """FSDP2: the integer form of `reshard_after_forward` makes two for every wrapped module."""
    mesh, groups = data_mesh(), set()
    for num_blocks in (1, 5):
        sharding = shard(SmallModel(num_blocks), mesh, zero_config(ALL_THREE, 2))
        assert len(sharding.units) == num_blocks + 1
        for unit in sharding.units:
            for hop in ("inner", "outer"):
                (group,) = parameters.groups_of(unit)
                gather, mean = group._all_gather_comm, group._reduce_scatter_comm
                groups.add((hop, "weights", getattr(gather, hop).group))
                groups.add((hop, "gradients", getattr(mean, hop).group))
    assert len(groups) == 4 == len({group for *_, group in groups})


@ranks(4)
def test_two_models_in_one_backward_pass():
    """DeepSpeed issues #4901 #7066: each has its own gathers, copies and reductions under way."""

    def gradients(together: bool) -> list[torch.Tensor]:
        models = [shard_on_nodes(ALL_THREE, small_model(3)) for _ in range(2)]
        mine = [tokens_of(number).chunk(4)[dist.get_rank()] for number in (0, 1)]
        for _ in range(2):  # the second time gradients are there already
            losses = (
                loss_of(sharding.model, tokens)
                for sharding, tokens in zip(models, mine, strict=True)
            )
            if together:
                sum(losses).backward()
            else:
                for loss in losses:
                    loss.backward()
        return [w.grad.full_tensor() for model in models for w in model.model.parameters()]

    for sharding, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(sharding, expected) and sharding.any()
