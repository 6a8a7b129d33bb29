"""All of PyTorch's optimizers train shards as whole weights, or are refused by name."""

import pytest
import torch

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, run, run_without_engine
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, optimizer_step, shard

UNNAMED = config_of() | {"optimizer": {}}
REFUSED = ("Adafactor", "LBFGS", "Rprop", "SparseAdam")
OTHERS = ("Optimizer", "Adam", "AdamW", "Muon")  # tested elsewhere; Muon takes matrices only


@ranks(2)
def test_pytorchs_optimizers():
    """3 steps of elementwise operations: 3 * 64 * 2^-24 = 1.2e-5, as in test_engine."""
    names = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    for name in sorted(names - {*REFUSED, *OTHERS}):
        kind = getattr(torch.optim, name)
        expected, *_ = run_without_engine(3, lambda model, kind=kind: kind(model.parameters()))
        engine, *_ = zeropp.initialize(model=small_model(), optimizer=kind, config=UNNAMED)
        assert run(engine, 3) == pytest.approx(expected, rel=1.2e-5), name


@ranks(2)
def test_optimizers_that_cannot_update_shards():
    for name in REFUSED:
        kind = getattr(torch.optim, name)
        message = f"{name} cannot update sharded weights"
        with pytest.raises(InputError, match=message):
            zeropp.initialize(model=small_model(), optimizer=kind, config=UNNAMED)
        model = small_model()
        with pytest.raises(InputError, match=message):
            zeropp.initialize(model=model, optimizer=kind(model.parameters()), config=UNNAMED)
    sharding = shard(small_model(), data_mesh(), zero_config({"stage": 1}))
    optimizer = torch.optim.Rprop(sharding.model.parameters())
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    with pytest.raises(InputError, match="Rprop cannot update sharded weights"):
        optimizer_step(optimizer, sharding)


@ranks(1)
def test_one_rank_without_shards_takes_them():
    engine, *_ = zeropp.initialize(model=small_model(), optimizer=torch.optim.Rprop, config=UNNAMED)
    assert len(run(engine, 2)) == 2
