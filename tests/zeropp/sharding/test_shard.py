"""Every ZeRO stage trains like one unsharded process."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.small_model import Block, SmallModel, small_model, tokens_of
from zeropp import Sharding, ZeroConfig, shard
from zeropp.sharding.cut import outermost_blocks
from zeropp.sharding.forecast import node_bytes

# Each of 3 AdamW steps may enlarge a rounding difference of 2^-24 by the depth of the sums
# (< 64 terms in rank order), so losses agree to 3 * 64 * 2^-24 = 1.1e-5; 1e-5 is the promise.


def sharded(
    stage: int, num_blocks: int = 2, model: nn.Module | None = None, **settings: object
) -> Sharding:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    config = ZeroConfig.from_json({"zero_optimization": {"stage": stage}, **settings})
    return shard(model or small_model(num_blocks), mesh, config)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(4)
def test_parameters_are_split_by_rows_and_freed_after_a_forward_pass(stage):
    model = small_model()
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    sharding = sharded(stage, model=model)
    gc.collect()
    assert all(whole() is None for whole in before)
    weights = dict(model.named_parameters())
    for name, whole in small_model().named_parameters():
        slices = whole.chunk(4)
        mine = slices[dist.get_rank()] if dist.get_rank() < len(slices) else whole[:0]
        assert isinstance(weights[name], DTensor)
        assert torch.equal(weights[name].to_local(), mine)
    with torch.no_grad():
        sharding.model(tokens_of(0))
    sharding.release()
    assert all(isinstance(weight, DTensor) for weight in sharding.model.parameters())


@ranks(2)
def test_blocks_run_without_the_rest_of_the_model():
    """In this order a block has and has not been used when the one before it prefetches it."""
    sharding = sharded(3, num_blocks=3)
    plain, x = small_model(3), torch.linspace(-1, 1, 24).view(2, 12)
    for number in (1, 0, 2, 1):
        output = sharding.model.blocks[number](x)
        torch.testing.assert_close(output, plain.blocks[number](x), rtol=0, atol=0)
        output.sum().backward()


def test_one_rank_in_fp32_is_left_alone():
    model = small_model()
    before = list(model.parameters())
    assert shard(model, None, ZeroConfig()).units == ()
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert type(model) is SmallModel


@ranks(2)
def test_description_counts_the_bytes_a_node_sends():
    sharding = sharded(3)
    # Rows padded to a multiple of 2: embedding 38x12; block 12+12+20x12+20+12x19+12 = 524 each.
    whole, blocks = 38 * 12 + 2 * 524, 2 * 524
    gathered, reduced = (whole + blocks) * 4, whole * 4
    padding = 3 * 16  # a packed row of a unit's gradients ends at a multiple of 16 bytes
    sent = sum(node_bytes(sharding.plan).values())
    assert gathered + reduced <= sent <= gathered + reduced + 2 * padding
    rows = dict(sharding.describe())
    assert rows["weights"] == "all-gather, 32 bit among 2 ranks of a node"
    assert rows["gradients"].startswith("all-to-all, 32 bit among 2 ranks of a node\nsummed in")
    assert rows["nodes"] == "1 of 2 ranks"
    assert rows["sends"].splitlines()[-1].split() == ["total", "0.00", f"{sent / 2**20:.2f}"]


def test_units_are_the_outermost_module_lists():
    inner = nn.ModuleList([Block()])
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(inner), Block()]), "b": Block()})
    assert outermost_blocks(model) == list(model["a"])


def test_lists_of_lists_are_one_list_of_blocks():
    """FSDP2 cannot shard a list, which has no forward pass."""
    layers = [nn.Linear(2, 2) for _ in range(4)]
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList(layers[:2]), *layers[2:]])})
    assert outermost_blocks(model) == layers
