"""What `zeropp.initialize` makes of optimizers, schedules and data, and which uses it refuses."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.families import Named
from tests.zeropp.deepspeed.small_engine import (
    adamw,
    config_of,
    engine_of,
    gathered_parameters,
    logged,
    run,
    run_without_engine,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError
from zeropp.deepspeed.ops.adam import FusedAdam
from zeropp.deepspeed.runtime.dataloader import RepeatingLoader, SamplesOfRank
from zeropp.deepspeed.runtime.lr_schedules import OneCycle, WarmupLR
from zeropp.optim.adam_op import kernel_for

SAME = 1e-5  # as in test_engine
NAMED = {
    "SGD": dict(lr=0.5, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": dict(lr=0.05, eps=1e-8, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_an_optimizer_of_torch_by_its_name(stage, kind):
    params = NAMED[kind]
    losses, _, _ = run_without_engine(
        optimizer_of=lambda model: getattr(torch.optim, kind)(model.parameters(), **params),
        model=Named(),
    )
    optimizer = {"type": kind.lower(), "params": params}
    engine = engine_of(Named(), stage=stage, optimizer=optimizer)
    assert type(engine.optimizer) is getattr(torch.optim, kind)
    assert run(engine) == pytest.approx(losses, rel=SAME)
    assert engine.optimizer_name() == kind.lower()


@pytest.mark.skipif(kernel_for(torch.device("cpu")) is None, reason="PyTorch's Adam is taken")
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("stage", [0, 3])
@ranks(1)
def test_adam_of_the_json_is_the_class_that_programs_ask_for(stage, kind, tmp_path):
    params = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    engine = engine_of(stage=stage, optimizer={"type": kind, "params": params})
    assert isinstance(engine.optimizer, FusedAdam)
    (group,) = engine.optimizer.param_groups
    assert {name: group[name] for name in params} == params | {"betas": (0.8, 0.95)}
    assert group["decoupled_weight_decay"]
    torchs = engine_of(
        stage=stage, optimizer={"type": kind, "params": params | {"torch_adam": True}}
    )
    assert type(torchs.optimizer) is torch.optim.AdamW
    # The same operations on each element, rounded in another order: within test_engine's bound.
    assert run(engine, steps=3) == pytest.approx(run(torchs, steps=3), rel=SAME)


@pytest.mark.skipif(hasattr(torch.optim, "Lion"), reason="this PyTorch has Lion")
@ranks(1)
def test_an_optimizer_that_torch_does_not_have():
    with pytest.raises(InputError, match=r'"Lion": PyTorch 2.* has no torch.optim.Lion; give'):
        engine_of(optimizer={"type": "Lion", "params": {"lr": 1e-3}})


@ranks(2)
def test_a_given_optimizer_or_schedule_counts_beside_the_json():
    expected = run(engine_of(), steps=2)
    model = small_model()
    chosen = [*model.parameters()]
    with logged() as lines:
        engine, optimizer, *_ = zeropp.initialize(
            model=model,
            optimizer=adamw(chosen[:-1]),
            model_parameters=chosen,
            lr_scheduler=lambda optimizer: WarmupLR(optimizer, warmup_min_lr=1e-2),
            config=config_of(
                optimizer={"type": "SGD", "params": {"lr": "auto"}},
                scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
            ),
        )
    text = "\n".join(lines)
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(engine.lr_scheduler, WarmupLR)
    for part in (
        'optimizer.type = "SGD" in the JSON has no effect',
        'scheduler.type = "WarmupDecayLR" in the JSON has no effect',
        f"the {len(chosen) - 1} parameters of the optimizer",
    ):
        assert dist.get_rank() or part in text
    assert run(engine, steps=2)[0] == expected[0]
    last = [*gathered_parameters(engine.module).values()][-1]
    assert torch.equal(last, [*small_model().parameters()][-1].detach())
    model = small_model()
    with pytest.raises(InputError, match="model_parameters are not those of the optimizer"):
        zeropp.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            model_parameters=[*model.parameters()][:2],
            config=config_of(),
        )


@pytest.mark.parametrize("place", ["none", "cpu"])
@ranks(1)
def test_a_schedule_belongs_to_the_optimizer(place):
    zero = {"stage": 2, "offload_optimizer": {"device": place}}
    model = small_model()
    other = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(InputError, match="lr_scheduler=, a StepLR, was made for another optimizer"):
        zeropp.initialize(
            model=model, lr_scheduler=schedule, config=config_of(zero_optimization=zero)
        )
    model = small_model()
    own = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    engine, *_ = zeropp.initialize(
        model=model, optimizer=own, lr_scheduler=schedule, config=config_of(zero_optimization=zero)
    )
    run(engine, steps=1)
    assert engine.get_lr() == [0.005]


@ranks(2)
def test_a_schedule_of_the_json_moves_rates_and_betas_and_goes_on(tmp_path):
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    params |= {"decay_step_size": 1, "decay_lr_rate": 0.5}
    schedule = {"type": "OneCycle", "params": params}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3}}
    engine = engine_of(scheduler=schedule, optimizer=optimizer)
    assert isinstance(engine.lr_scheduler, OneCycle)
    seen = []
    for step in range(6):
        seen.append((engine.get_lr()[0], engine.get_mom()[0][0]))
        run(engine, steps=1, first=step)
    rates, beta1 = zip(*seen, strict=True)
    assert rates == pytest.approx([0.01, 0.055, 0.1, 0.055, 0.01, 0.01 / 1.5])
    assert beta1 == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9, 0.9])
    engine.save_checkpoint(tmp_path)
    other = engine_of(scheduler=schedule, optimizer=optimizer)
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == engine.get_lr() and other.get_mom() == engine.get_mom()
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    with pytest.raises(InputError, match="set_lr got 2 rates for 1 parameter groups"):
        engine.set_lr([0.1, 0.2])


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
    for config in (UNNAMED | {"zero_optimization": OFFLOAD}, UNNAMED):
        model = small_model()
        optimizer = adamw(model.parameters())
        loss_of(model, tokens_of(0)).backward()
        optimizer.step()
        with pytest.raises(InputError, match="AdamW given to zeropp.initialize has state already"):
            zeropp.initialize(model=model, optimizer=optimizer, config=config)
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


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return self.count


@ranks(2)
def test_ranks_share_the_samples_of_a_stream():
    loader = zeropp.initialize(
        model=small_model(), config=config_of(micro_batches=2), training_data=Stream(11)
    )[2]
    for _ in range(2):  # epochs
        batches = [batch.tolist() for batch in loader]
        assert batches == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])[dist.get_rank()]


def test_all_ranks_get_as_many_and_the_length_is_that_of_a_rank():
    of_ranks = [SamplesOfRank(StreamWithLength(11), 3, rank) for rank in range(3)]
    assert [list(samples) for samples in of_ranks] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [len(samples) for samples in of_ranks] == [3, 3, 3]
    loader = torch.utils.data.DataLoader(of_ranks[0], 2, drop_last=True)
    assert len(loader) == len(list(loader)) == 1
    with pytest.raises(TypeError, match="has no len"):
        len(SamplesOfRank(Stream(11), 3, 0))


def test_it_begins_again_and_shuffles_anew():
    data = torch.arange(8)
    sampler = DistributedSampler(data, 2, 0)
    loader = RepeatingLoader(DataLoader(data, 2, sampler=sampler))
    rounds = [[next(loader).tolist() for _ in range(2)] for _ in range(3)]
    assert len(loader) == 2 and len({str(each) for each in rounds}) > 1
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected.append([batch.tolist() for batch in DataLoader(data, 2, sampler=sampler)])
    assert rounds == expected


def test_any_iterable_of_batches_and_none():
    assert [batch for batch, _ in zip(RepeatingLoader([1, 2]), range(5), strict=False)] == [
        1, 2, 1, 2, 1,
    ]  # fmt: skip
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
