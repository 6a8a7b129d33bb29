"""Marks of leaf modules: they are found, shown and removed, and training is the same."""

import pytest
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, logged, run
from tests.zeropp.small_model import Block, small_model
from zeropp import InputError, deepspeed
from zeropp.deepspeed import utils


def test_modules_are_marked_by_class_name_and_ending():
    model = small_model()
    blocks = [*model.blocks]
    for kind in (Block, "Block", "tests.zeropp.small_model.Block"):
        assert (
            utils.set_z3_leaf_modules(model, [kind]) == blocks == utils.get_z3_leaf_modules(model)
        )
        assert utils.z3_leaf_module(blocks[0]) and not utils.z3_leaf_module(model)
        assert utils.unset_z3_leaf_modules(model, [kind]) == blocks
        assert not utils.get_z3_leaf_modules(model)
    found, missing = utils.set_z3_leaf_modules_by_name(
        model, ["blocks.1", "none"], raise_if_not_found=False
    )
    assert found == [blocks[1]] and missing == ["none"]
    found, missing = utils.set_z3_leaf_modules_by_suffix(model, ["up"])
    assert found == [block.up for block in blocks] and not missing
    assert utils.set_z3_leaf_modules(model, ["Mixture"], raise_if_not_found=False) == []
    with pytest.raises(InputError, match="no module of Mixture"):
        utils.set_z3_leaf_modules(model, ["Mixture"])
    with pytest.raises(InputError, match="no module named none"):
        utils.set_z3_leaf_modules_by_name(model, ["none"])


@ranks(2)
def test_a_marked_model_trains_as_any_and_one_line_says_why():
    expected = run(engine_of(), steps=2)
    model = small_model()
    with logged() as lines:
        utils.set_z3_leaf_modules(model, [Block])
        leaves = {"stage": 3, "leaf_module": {"classes": ["Block"]}}
        engine, *_ = deepspeed.initialize(model=model, config=config_of(zero_optimization=leaves))
    assert run(engine, steps=2) == expected
    assert sum("leaf modules have no effect here" in line for line in lines) == 1
    key = "zero_optimization.leaf_module has no effect"
    assert dist.get_rank() or any(line.startswith(key) for line in lines)
