"""What `zeropp.shard` cannot do ends on every rank with an error that says what to change."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import logged
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharding.expert_model import ExpertModel, expert_mesh
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, shard
from zeropp.wire.rank_group import Nodes

TUTORIAL = {"zero_hpz_partition_size": 16}


class Marked(nn.Parameter):
    """A kind of parameter that the library has never seen."""


class Wrapped(torch.Tensor):
    """A kind of tensor that makes a parameter of its own kind."""


def refused(message: str, zero: dict, ranks_per_node: int | None, model=None) -> None:
    """`shard` raises an InputError that says `message` and leaves the model as it was."""
    model = model or small_model()
    before = list(model.parameters())
    with pytest.raises(InputError, match=re.escape(message)):
        shard(model, data_mesh(), zero_config(zero, ranks_per_node))
    assert all(
        parameter is current for parameter, current in zip(before, model.parameters(), strict=True)
    )


@ranks(4)
def test_settings_that_do_not_fit_the_ranks():
    hpz = ALL_THREE | {"zero_hpz_partition_size": 3}
    message = (
        "zero_hpz_partition_size = 3 does not divide the 4 ranks: use the ranks of one node, 2"
    )
    refused(message, hpz, 2)
    for zero in ({"stage": 3}, {"stage": 1}, ALL_THREE):
        refused("ranks_per_node = 3 does not divide the 4 ranks", zero, 3)
        refused("set ranks_per_node to a divisor of the number of ranks", zero, 3)


@ranks(4)
def test_nodes_of_different_sizes_are_refused_on_every_rank():
    """DeepSpeed issues #5054; each rank knows only how many there are on its own node."""
    message = "nodes have different numbers of ranks, 1 to 3: start the same number"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3" if dist.get_rank() < 3 else "1")
        refused(message, ALL_THREE, None)
        refused(message, {"stage": 3}, None)
        sharding = shard(small_model(), data_mesh(), zero_config(ALL_THREE, 2))  # as is proposed
    assert sharding.plan.units[-1].axis.weights.nodes == Nodes(num_ranks=4, ranks_per_node=2)


def test_the_ranks_of_a_node_must_follow_each_other():
    assert Nodes.of([4, 5, 2, 3], 2) == Nodes(num_ranks=4, ranks_per_node=2)
    assert Nodes.of([0, 2, 4, 6], 4) == Nodes(num_ranks=4, ranks_per_node=2)  # of two axes
    with pytest.raises(InputError, match="visits a node twice.*order the mesh"):
        Nodes.of([0, 2, 1, 3], 2)
    with pytest.raises(InputError, match="nodes would have 2, 2, 1 of them"):
        Nodes.of(range(5), 2)


UNKNOWN = {
    "integer": (
        lambda: nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False),
        "parameter blocks.1.extra is torch.int64: only floating-point parameters can be sharded; "
        "register it as a buffer",
    ),
    "complex": (
        lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        "parameter blocks.1.extra is torch.complex64",
    ),
    "a kind of parameter": (
        lambda: Marked(torch.ones(3)),
        "parameter blocks.1.extra is a tests.zeropp.sharding.test_checks.Marked, which zeropp does",
    ),
    "a kind of tensor": (
        lambda: nn.Parameter(torch.ones(3).as_subclass(Wrapped)),
        "Wrapped, which zeropp does not know how to gather: use a plain torch.nn.Parameter",
    ),
    "lazy": (nn.UninitializedParameter, "UninitializedParameter, which zeropp does not know"),
}


@pytest.mark.parametrize("kind", list(UNKNOWN))
@ranks(2)
def test_parameters_that_cannot_be_gathered_as_numbers(kind):
    make, message = UNKNOWN[kind]
    for zero in ({"stage": 0}, {"stage": 3}):
        model = small_model()
        model.blocks[1].extra = make()
        refused(message, zero, None, model)


@ranks(2)
def test_units_that_overlap():
    model = small_model()
    block = model.blocks[1]
    for units, message in (
        ([block, block.up], "blocks.1.up comes after blocks.1, which has its parameters"),
        ([block, block], "blocks.1 comes after itself"),
        ([block, model], "number 1, a SmallModel, is the whole model"),
        ([nn.Linear(2, 2)], "number 0, a Linear, is not in the model"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            shard(model, data_mesh(), zero_config({"stage": 3}), units=units)


@ranks(2)
def test_integer_buffers_stay_whole_on_every_rank():
    model = small_model()
    model.blocks[1].register_buffer("extra", torch.arange(3))
    sharding = shard(model, data_mesh(), zero_config({"stage": 3}))
    assert torch.equal(sharding.model.blocks[1].extra, torch.arange(3))


@ranks(2)
def test_trainable_parameters_of_two_types_in_one_unit():
    """FSDP2: trainable parameters of a group need one original dtype; frozen ones may differ."""
    model = small_model()
    model.blocks[1].up.bfloat16()
    refused(
        "blocks.1.norm.weight is torch.float32 and blocks.1.up.weight torch.bfloat16: the "
        "parameters of a unit that are trained must have one type", {"stage": 3}, None, model,
    )  # fmt: skip
    model.blocks[1].up.requires_grad_(False)
    shard(model, data_mesh(), zero_config({"stage": 3}))
    other = small_model()
    other.blocks[1].bfloat16()  # another type in another unit
    shard(other, data_mesh(), zero_config({"stage": 3}))


@ranks(2)
def test_a_weight_that_two_units_share():
    """FSDP2: parameters tied across groups raise; tied inside one group they work."""
    model = small_model(3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    message = "blocks.0.up.weight and blocks.2.up.weight are one parameter in two units"
    refused(message, {"stage": 3}, None, model)
    sharding = shard(model, data_mesh(), zero_config({"stage": 3}), units=[model.blocks[1]])
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    loss_of(sharding.model, tokens_of(0)).backward()
    assert model.blocks[0].up.weight.grad is not None
    headed = small_model()
    headed.blocks[1].head = headed.embedding
    refused("embedding.weight and blocks.1.head.weight are one", {"stage": 3}, None, headed)
    inside = small_model()
    inside.blocks[0].again = inside.blocks[0].up
    shard(inside, data_mesh(), zero_config({"stage": 3}))


@ranks(2)
def test_a_model_that_is_sharded_already():
    model = small_model()
    shard(model, data_mesh(), zero_config({"stage": 3}))
    with pytest.raises(InputError, match="zeropp.shard, it, is sharded already: give a new one"):
        shard(model, data_mesh(), zero_config({"stage": 3}))
    larger = nn.Sequential(nn.Linear(1, 1), model)
    with pytest.raises(InputError, match="zeropp.shard, its 1, is sharded already"):
        shard(larger, data_mesh(), zero_config({"stage": 3}))


@ranks(4, ranks_per_node=2)
def test_the_size_of_a_node_is_the_launchers_and_not_a_count_of_devices():
    """DeepSpeed 0.19.8: `device_count()` taken for the node size."""
    nodes = Nodes(num_ranks=4, ranks_per_node=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 4)
        patch.setattr(torch.accelerator, "device_count", lambda: 4)
        for zero in ({"stage": 3}, ALL_THREE):
            axis = shard(small_model(), data_mesh(), zero_config(zero)).plan.units[-1].axis
            assert axis.weights.nodes == axis.gradients.nodes == nodes
        plan = shard(small_model(), data_mesh(), zero_config({"stage": 3}, 1)).plan
    assert plan.units[-1].axis.gradients.nodes.ranks_per_node == 1


def described(sharding: Sharding) -> dict[str, str]:
    return dict(sharding.describe())


@pytest.mark.parametrize(
    ("ranks_per_node", "weights", "gradients"),
    [
        (4, "all-gather, INT8 among 4 ranks of a node",
         "all-to-all, INT8 among 4 ranks of a node"),
        (2, "all-gather, INT8 among 2 ranks across nodes,\nthen INT8 among 2 of a node",
         "all-to-all, INT8 among 2 ranks of a node,\nthen INT4 among 2 across nodes"),
        (1, "all-gather, INT8 among 4 ranks across nodes",
         "all-to-all, INT4 among 4 ranks across nodes"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(4)
def test_the_description_names_what_runs_on_each_hop(stage, ranks_per_node, weights, gradients):
    """DeepSpeed 0.19.8: qgZ on one node, and at stage 2, is ignored in silence."""
    zero = ALL_THREE | {"stage": stage, "zero_hpz_partition_size": 1}
    rows = described(shard(small_model(), data_mesh(), zero_config(zero, ranks_per_node)))
    assert rows["weights"] == weights
    assert rows["gradients"].startswith(gradients)


@ranks(4)
def test_the_description_of_a_copy_larger_than_a_node():
    """D2: a size other than `ranks_per_node` is allowed and the log says what crosses nodes."""
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    inside = described(shard(small_model(), data_mesh(), zero_config(zero, 2)))["weights"]
    assert "then 32 bit among 2 of a node\nkept" in inside
    weights = described(shard(small_model(), data_mesh(), zero_config(zero, 1)))["weights"]
    assert "then 32 bit among 2 across nodes\nkept" in weights
    larger = zero_config(ALL_THREE | {"zero_hpz_partition_size": 4}, 2)
    with logged() as lines:
        whole = described(shard(small_model(), data_mesh(), larger))["weights"]
    assert "INT8 among 4 ranks in and across nodes" in whole
    assert len(lines) == 1 and "zero_hpz_partition_size = 4 covers all ranks" in lines[0]
    with logged() as lines:
        one_node = shard(small_model(), data_mesh(), zero_config(ALL_THREE | TUTORIAL, 4))
    with logged() as of_two_nodes:
        halves = shard(small_model(), data_mesh(), zero_config(ALL_THREE | TUTORIAL, 2))
    assert halves.plan.units[-1].axis.weights.inner == 2 and len(of_two_nodes) == 1
    assert not one_node.plan.axis.weights.keeps
    assert "INT8 among 4" in described(one_node)["weights"]
    assert len(lines) == 1 and "using the 4 ranks of one node; a copy sharded" in lines[0]


@ranks(2)
def test_a_parameter_that_is_not_contiguous():
    model = small_model()
    weight = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().t().contiguous().t())
    refused("blocks.1.up.weight lies in memory with strides [1, 19]", {"stage": 2}, 2, model)


@ranks(4)
def test_experts_that_do_not_fit_are_refused() -> None:
    mesh, data = expert_mesh(2), data_mesh()
    split = ExpertModel(8, mesh)
    odd = ExpertModel(8)
    odd.experts[1].up = nn.Parameter(torch.zeros(9, 16))
    crossed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_data"))
    for model, modules, settings, text in (
        (odd, dict.fromkeys(odd.experts, mesh), {"stage": 3}, "shape .9, 16., and 2 ranks"),
        (split, {split.blocks[0]: mesh}, {"stage": 3}, "is not inside a unit"),
        (split, dict.fromkeys(split.experts, data), {"stage": 3}, "a mesh of 1 axes"),
        (split, dict.fromkeys(split.experts, crossed), {"stage": 3}, "is not split over"),
    ):
        with pytest.raises(InputError, match=text):
            shard(model, data, zero_config(settings, ranks_per_node=2), experts=modules)
