"""The codes that nodes keep, in a checkpoint: names, and what another number of ranks does."""

import logging

import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.sharded_training import BOTH, shard_on_nodes, step
from tests.zeropp.small_model import small_model
from zeropp.checkpoint.kept_codes import (
    codes_to_load,
    codes_to_save,
    restore_codes,
    without_codes,
)


@ranks(4)
def test_only_the_same_number_of_ranks_goes_on_from_codes():
    sharding = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    assert codes_to_save(sharding.model) == {}
    step(sharding, optimizer, 0)
    step(sharding, optimizer, 1)
    saved = {name: tensor.clone() for name, tensor in codes_to_save(sharding.model).items()}
    rank = dist.get_rank()
    kinds = {name.split(".")[1] for name in saved}
    assert kinds == {"codes", "steps"} and len(saved) == 2 * len(sharding.units)
    assert without_codes({**saved, "model.weight": torch.ones(1)}).keys() == {"model.weight"}
    of_all = {
        name.replace(f"rank{rank}", f"rank{r}"): t for r in range(4) for name, t in saved.items()
    }
    assert codes_to_load(sharding.model, of_all).keys() == saved.keys()
    of_two = {name: tensor for name, tensor in of_all.items() if name[:5] in ("rank0", "rank1")}
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("zeropp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    assert codes_to_load(sharding.model, of_two) == {}
    logger.removeHandler(handler)
    assert [record.getMessage()[:66] for record in records] == (
        ["the checkpoint's codes of weights are of 2 ranks, and there are 4:"] if rank == 0 else []
    )
    other = shard_on_nodes(BOTH, small_model(), zeropp={"weight_steps": True})
    other.weights_changed()
    restore_codes(other.model, saved)
    for name, tensor in codes_to_save(other.model).items():
        assert torch.equal(tensor, saved[name])


@ranks(4)
def test_without_steps_nothing_is_saved():
    sharding = shard_on_nodes(BOTH)
    step(sharding, torch.optim.SGD(sharding.model.parameters(), lr=0.1), 0)
    assert codes_to_save(sharding.model) == {}
