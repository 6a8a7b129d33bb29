"""A plan says what FSDP2 will hold, before anything is changed."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharding.random_models import RandomModel
from zeropp import InputError, shard
from zeropp import fsdp_adapter as fsdp
from zeropp.sharding.cut import outermost_blocks, places_of, plan_units
from zeropp.sharding.plan import DataAxis, Plan, UnitPlan
from zeropp.wire.rank_group import Nodes, everyone

SETTINGS = ({"stage": 0}, {"stage": 1}, {"stage": 3})
STORED = {"stage": 3, "zero_quantized_nontrainable_weights": True}


def frozen_but_for_biases(seed: int) -> nn.Module:
    """A random model whose matrices are stored as codes beside trained vectors."""
    model = RandomModel(seed)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    return model


def held(units: tuple[fsdp.FSDPModule, ...]) -> list[Counter]:
    return [Counter(fsdp.own_specs(unit)) for unit in units]


@ranks(3)
def test_units_of_random_models_hold_what_was_planned() -> None:
    mesh = data_mesh()
    for seed in range(8):
        for zero in (*SETTINGS, STORED)[seed % 2 :: 2]:
            config = zero_config(zero, bf16={"enabled": seed % 4 < 2})
            build = frozen_but_for_biases if zero is STORED else RandomModel
            model, twin = build(seed), build(seed)
            axis = DataAxis.of(config, everyone(Nodes(num_ranks=3, ranks_per_node=3), 0))
            blocks = outermost_blocks(twin)
            planned = plan_units(twin, blocks, places_of(twin, blocks), axis, config)
            assert not any(isinstance(each, fsdp.FSDPModule) for each in twin.modules())
            sharding = shard(model, mesh, config)
            assert [Counter(unit.specs) for unit in planned] == held(sharding.units)
            assert [unit.is_root for unit in planned][-1]
            dtypes = [fsdp.dtypes_of(unit)[0] for unit in sharding.units if fsdp.own_specs(unit)]
            assert dtypes == [unit.dtype for unit in planned if unit.specs]


@ranks(2)
def test_what_is_refused_changes_nothing() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4).double())
    model.forward = lambda x: model[1](model[0][0](x).double())
    model[1].bias = nn.Parameter(model[1].bias.float())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(InputError, match="must have one type"):
        shard(model, data_mesh(), zero_config({"stage": 3}))
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_axis_of_most_ranks_is_a_plans_axis() -> None:
    config = zero_config({"stage": 3})
    sizes = (Nodes(num_ranks=n, ranks_per_node=2) for n in (8, 4))
    wide, narrow = (DataAxis.of(config, everyone(nodes, 0)) for nodes in sizes)
    units = tuple(
        UnitPlan(specs=(), axis=axis, dtype=torch.float32, wire_dtype=torch.float32)
        for axis in (narrow, wide)
    )
    common = {"stage": 3, "reduces_once": False, "keeps_roots": False}
    plan = Plan(**common, compute_dtype=torch.float32, units=units)
    assert plan.axis is wide and plan.num_ranks == 8
    assert Plan(**common, compute_dtype=torch.float32).num_ranks == 1
