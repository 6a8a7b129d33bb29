"""Wrong uses of an engine end with an error that says what to change."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import adamw, config_of, engine_of, run
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError

UNNAMED = config_of() | {"optimizer": {}}
SCHEDULE = {"type": "WarmupLR"}
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
ARGUMENTS = {
    "mpu": (dict(mpu=object()), "mpu: there are no tensor"),
    "port": (dict(distributed_port=1234), "distributed_port = 1234: the launcher chooses"),
    "mesh_param": (dict(mesh_param=(2, 1)), "mesh_param = (2, 1): expected a torch DeviceMesh"),
    "no model": (dict(model=None), "needs model=, an nn.Module, not NoneType"),
    "no config": (dict(config=None), "needs config="),
    "two configs": (dict(config_params={}), "config and config_params are both given"),
    "no sizes": (dict(config={}), "give train_batch_size or train_micro_batch_size_per_gpu"),
    "wrong sizes": (dict(config={"train_batch_size": 3}), "train_batch_size = 3: expected a mul"),
    "no such file": (dict(config="nowhere.json"), "cannot read the configuration nowhere.json"),
    "a number": (dict(config=7), "the configuration is 7: give a dict, the path of a JSON file"),
    "auto": (
        dict(config=config_of(optimizer={"type": "Adam", "params": {"lr": "auto"}})),
        'optimizer.params.lr = "auto"',
    ),
    "nodes alone": (
        dict(config=config_of(zeropp={"sync_every": {"0": 1, "9": 2}})),
        'zeropp.sync_every = {"0": 1, "9": 2}: all ranks of zeropp.initialize',
    ),
    "schedule alone": (
        dict(config=UNNAMED | {"scheduler": SCHEDULE}),
        "a learning-rate schedule without an optimizer",
    ),
    "no total": (
        dict(config=config_of(scheduler={"type": "WarmupDecayLR"})),
        'scheduler.type = "WarmupDecayLR" needs scheduler.params.total_num_steps',
    ),
    "another schedule's": (
        dict(config=config_of(scheduler=SCHEDULE | {"params": {"cycle_max_lr": 1}})),
        'scheduler.params.cycle_max_lr = 1.0: scheduler.type = "WarmupLR" takes warmup_min_lr',
    ),
    "no bounds": (
        dict(config=config_of(scheduler={"type": "OneCycle"})),
        'scheduler.type = "OneCycle" needs scheduler.params.cycle_min_lr',
    ),
    "another optimizer's": (
        dict(config=config_of(optimizer={"type": "SGD", "params": {"betas": [0.9, 0.95]}})),
        'optimizer.params.betas = [0.9, 0.95]: optimizer.type = "SGD" takes lr, momentum',
    ),
    "not offloadable": (
        dict(config=config_of(optimizer={"type": "SGD"}, zero_optimization=OFFLOAD)),
        "SGD cannot be offloaded",
    ),
    "no optimizer made": (
        dict(config=UNNAMED, optimizer=lambda parameters: 7),
        "it made a int",
    ),
    "a stranger": (
        dict(config=UNNAMED, optimizer=adamw([nn.Parameter(torch.ones(3))])),
        "parameter 0 of shape [3] in group 0 of the optimizer is not one of the model's",
    ),
    "a stranger chosen": (
        dict(model_parameters=[nn.Parameter(torch.ones(3))]),
        "parameter 0 of shape [3] in model_parameters is not one of the model's",
    ),
}


@ranks(2)
def test_unsupported_arguments():
    for arguments, message in ARGUMENTS.values():
        with pytest.raises(InputError) as raised:
            zeropp.initialize(**{"model": small_model(), "config": config_of(), **arguments})
        assert message in str(raised.value)


@ranks(2)
def test_an_optimizer_that_has_stepped_is_refused():
    model = small_model()
    optimizer = adamw(model.parameters())
    loss_of(model, tokens_of(0)).backward()
    optimizer.step()
    with pytest.raises(InputError, match="has state already"):
        zeropp.initialize(model=model, optimizer=optimizer, config=UNNAMED)
    with pytest.raises(InputError, match="is sharded already"):
        zeropp.initialize(model=model, config=config_of())


@ranks(1)
def test_ranks_are_joined_unless_that_is_refused():
    dist.destroy_process_group()
    with pytest.raises(InputError, match="dist_init_required=False, and"):
        zeropp.initialize(model=small_model(), config=config_of(), dist_init_required=False)
    assert not dist.is_initialized()


@ranks(1)
def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = small_model()
    with pytest.raises(InputError, match="inside zeropp.zero.Init"):
        zeropp.initialize(model=model, config=config_of())


@ranks(1)
def test_calls_in_the_wrong_order():
    engine = engine_of(micro_batches=2)
    with pytest.raises(InputError, match="without a forward pass"):
        engine.backward(torch.ones(()))
    with pytest.raises(InputError, match=r"without engine.backward\(loss\)"):
        engine.step()
    with pytest.raises(InputError, match=r"the loss has shape \[8, 5, 37\]"):
        engine.backward(engine(tokens_of(0)[:, :-1]))
    with pytest.raises(InputError, match="the loss is a dict: give a tensor of one number"):
        engine.backward({"loss": loss_of(engine, tokens_of(0))})
    engine.backward(loss_of(engine, tokens_of(0)))
    with pytest.raises(InputError, match="this step has begun"):
        engine.set_train_batch_size(24)
    engine.step()
    without, *_ = zeropp.initialize(model=small_model(), config=UNNAMED)
    assert run(engine_of(), steps=1)[0] == loss_of(without, tokens_of(0)).item()
    with pytest.raises(InputError, match="needs an optimizer"):
        without.step()
