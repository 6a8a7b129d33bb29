"""`zeropp.zero`: models that are built without memory, and parameters gathered in a context."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, gathered_parameters, run
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError
from zeropp.deepspeed import zero
from zeropp.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zeropp.deepspeed.zero import GatheredParameters, Init
from zeropp.ranks.coordination import RankError
from zeropp.sharding.recorded_tensor import RecordedTensor

BF16 = {"bf16": {"enabled": True}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 3}, OFFLOADED], ids=str)
@ranks(2)
def test_a_model_built_later_trains_as_one_built_at_once(zero):
    expected = run(engine_of(zero_optimization=zero))
    with Init(config_dict_or_path=config_of()):
        torch.manual_seed(5 + dist.get_rank())  # the first rank's seed is fresh_stack's
        model = SmallModel()
    assert all(isinstance(parameter, RecordedTensor) for parameter in model.parameters())
    engine = engine_of(model, zero_optimization=zero)
    plain = dict(small_model().named_parameters())
    for name, weight in gathered_parameters(engine.module).items():
        assert torch.equal(weight, plain[name].detach())
    assert run(engine) == expected


@ranks(2)
def test_an_optimizer_may_hold_parameters_that_do_not_exist_yet():
    expected = run(engine_of())
    with Init():
        model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    unnamed = config_of() | {"optimizer": {}}
    engine, *_ = zeropp.initialize(model=model, optimizer=optimizer, config=unnamed)
    assert run(engine) == expected


@ranks(2)
def test_shard_gives_memory_too_and_only_the_first_rank_makes_whole_tensors():
    materialized_shapes = []

    with Init():
        model = small_model()
    original = RecordedTensor.materialize
    RecordedTensor.materialize = lambda self: (
        materialized_shapes.append(self.shape) or original(self)
    )
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        config = zeropp.ZeroConfig.from_json({"zero_optimization": {"stage": 3}})
        sharding = zeropp.shard(model, mesh, config)
    finally:
        RecordedTensor.materialize = original
    assert len(materialized_shapes) == (13 if dist.get_rank() == 0 else 0)
    assert all(isinstance(parameter, DTensor) for parameter in sharding.model.parameters())
    with torch.no_grad():
        assert loss_of(model, tokens_of(0)) == loss_of(small_model(), tokens_of(0))


@ranks(1)
def test_one_rank_and_a_disabled_block_build_ordinary_models():
    with Init(enabled=False):
        assert not any(
            isinstance(parameter, RecordedTensor) for parameter in small_model().parameters()
        )
    with Init():
        model = small_model()
    assert run(engine_of(model)) == run(engine_of())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def collected(model: nn.Module) -> dict[str, torch.Tensor]:
    """What programs save that ask each parameter whether it is sharded."""
    weights = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            assert parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE
            with GatheredParameters([parameter]):
                assert parameter.ds_status == ZeroParamStatus.AVAILABLE
                weights[name] = parameter.data.detach().cpu().clone()
        else:
            weights[name] = parameter.detach().cpu().clone()
    return weights


@pytest.mark.parametrize("settings", [dict(), dict(zero_optimization=HPZ)], ids=["plain", "hpZ"])
@ranks(2)
def test_sharded_parameters_say_so_by_deepspeeds_attributes(settings):
    engine, plain = engine_of(**settings), dict(small_model().named_parameters())
    for steps in (0, 2):
        run(engine, steps=steps)
        with torch.no_grad():
            loss_of(engine, tokens_of(0))
        for name, weight in collected(engine.module).items():
            assert type(weight) is torch.Tensor
            assert torch.equal(weight, plain[name]) == (steps == 0)
        for name, parameter in engine.module.named_parameters():
            assert parameter.ds_shape == plain[name].shape
            assert parameter.ds_numel == plain[name].numel()
            assert parameter.ds_tensor.data_ptr() == parameter.to_local().data_ptr()
    assert len({parameter.ds_id for parameter in engine.module.parameters()}) == len(plain)
    for stage in (0, 2):
        with Init():
            model = small_model()
        others = engine_of(model, stage=stage).module.parameters()
        assert not any("ds_" in name for parameter in others for name in vars(parameter))


@ranks(2)
def test_parameters_without_memory_are_gathered_and_changed_by_any_rank():
    with Init():
        layer = nn.Linear(4, 2, bias=False)
    assert layer.weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    assert layer.weight.ds_shape == layer.weight.shape and layer.weight.ds_numel == 8
    assert not hasattr(nn.Linear(4, 2).weight, "ds_id")
    for writer in (1, 0):
        with GatheredParameters([layer.weight, layer.bias], modifier_rank=writer):
            assert layer.weight.ds_status == ZeroParamStatus.AVAILABLE
            if dist.get_rank() == writer:
                nn.init.constant_(layer.weight, writer)
        with GatheredParameters(layer.weight), GatheredParameters(None):
            assert torch.equal(layer.weight, torch.full_like(layer.weight, writer))
    zero.register_external_parameter(nn.Identity(), layer.weight)
    with pytest.raises(InputError, match="takes a module and a parameter, not Linear and Tensor"):
        zero.register_external_parameter(layer, torch.ones(1))


def test_arguments_without_a_meaning_here_are_refused():
    for arguments, message in (
        (dict(module=nn.Linear(1, 1)), "build the model inside"),
        (dict(dtype=torch.half), "the shards are fp32"),
        (dict(remote_device="nvme"), "offload_param says where shards live"),
        (dict(sequence=3), "has no argument sequence"),
        (dict(config={"fp17": 1}), 'unknown key "fp17"'),
    ):
        with pytest.raises(InputError, match=message), Init(**arguments):
            pass


@ranks(2)
def test_gathered_parameters_are_whole_in_place_and_changes_are_discarded():
    engine, plain = engine_of(), small_model()
    run(engine, steps=0)
    weight = engine.module.blocks[0].up.weight
    before = weight.to_local().clone()
    with GatheredParameters(list(engine.parameters())):
        for parameter, expected in zip(engine.parameters(), plain.parameters(), strict=True):
            assert not isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter.detach(), expected.detach())
        assert engine.module.blocks[0].up.weight is weight and weight.shape == (19, 12)
        nn.init.ones_(weight)
    assert isinstance(weight, DTensor) and torch.equal(weight.to_local(), before)
    assert run(engine, steps=1) == run(engine_of(), steps=1)


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_changes_of_one_rank_are_written_back_on_all(stage):
    def changed(weight: nn.Parameter, by: float) -> None:
        with torch.no_grad():
            weight[1:5].add_(by)
        weight.data = weight.data * 2

    engine, plain = engine_of(stage=stage), small_model()
    changed(plain.blocks[1].up.weight, by=1.0)
    run_before = gathered_parameters(engine.module)
    with GatheredParameters(engine.module.blocks[1].up.weight, modifier_rank=1):
        changed(engine.module.blocks[1].up.weight, by=float(dist.get_rank()))
    for name, weight in gathered_parameters(engine.module).items():
        assert torch.equal(weight, dict(plain.named_parameters())[name].detach())
        assert torch.equal(weight, run_before[name]) == (name != "blocks.1.up.weight")
    with torch.no_grad():
        assert loss_of(engine, tokens_of(0)) == loss_of(plain, tokens_of(0))
    losses = run(engine, steps=2)
    assert losses[0] != losses[1]  # what was swapped back trains on


@pytest.mark.parametrize(
    "settings",
    [
        dict(stage=0, **BF16),
        dict(zero_optimization=OFFLOADED, **BF16),
        dict(stage=3),
        dict(zero_optimization=HPZ, **BF16),
    ],
    ids=["stage 0", "stage 2, offloaded", "stage 3", "stage 3, hpZ"],
)
@ranks(4, ranks_per_node=2)
def test_one_rank_loads_a_state_and_runs_the_model_inside(settings, tmp_path):
    engine, other = engine_of(**settings), engine_of(**settings)
    with torch.no_grad():
        first = loss_of(engine, tokens_of(0))  # leaves gathered weights or copies
        # bf16 numbers, as an offloaded model's gathered weights are
        state = {name: (0.9 * value).bfloat16().float()
                 for name, value in small_model().state_dict().items()}  # fmt: skip
    other.module.load_state_dict(state)
    with GatheredParameters(engine.module.parameters(), modifier_rank=1):
        if dist.get_rank() == 1:
            engine.module.load_state_dict(state)
            with torch.no_grad():
                inside = loss_of(engine, tokens_of(0))
            for name, value in engine.module.state_dict().items():
                assert torch.equal(value.float(), state[name])
    with torch.no_grad():
        loss = loss_of(engine, tokens_of(0))
        assert loss == loss_of(other, tokens_of(0)) != first
    assert dist.get_rank() != 1 or inside == loss
    if engine.sharding.stage == 3:
        with GatheredParameters(engine.module.parameters()):
            if dist.get_rank() == 2:
                engine.module.load_state_dict({name: value * 0 for name, value in state.items()})
                assert not engine.module.embedding.weight.any()
        with GatheredParameters(engine.module.blocks[1].parameters()):
            output = loss_of(engine, tokens_of(0))  # the other units are gathered, by all ranks
            with pytest.raises(InputError, match="a backward pass inside GatheredParameters"):
                output.backward()
            for call in (engine.save_checkpoint, engine.load_checkpoint):
                with pytest.raises(InputError, match="_checkpoint inside GatheredParameters"):
                    call(tmp_path)
    engine.zero_grad()
    assert run(engine, steps=2) == run(other, steps=2)


@ranks(3)
def test_an_error_inside_leaves_the_shards_as_they_were():
    engine = engine_of(train_batch_size=9)
    weight = engine.module.embedding.weight
    kind = ZeroDivisionError if dist.get_rank() == 1 else RankError
    with pytest.raises(kind, match="on rank 1:" if kind is RankError else "by nothing"):
        with GatheredParameters([weight], modifier_rank=0):
            nn.init.zeros_(weight)
            if dist.get_rank() == 1:
                raise ZeroDivisionError("by nothing")
    assert torch.equal(
        gathered_parameters(engine.module)["embedding.weight"], small_model().embedding.weight
    )
    for wrong in (3, -1):
        with pytest.raises(InputError, match="expected a rank from 0 to 2"):
            with GatheredParameters([weight], modifier_rank=wrong):
                pass
    with pytest.raises(InputError, match="takes parameters, not str"):
        with GatheredParameters(["weight"]):
            pass


def test_parameters_that_are_not_sharded_stay_as_they_are():
    model = small_model()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        nn.init.zeros_(model.embedding.weight)
    assert model.embedding.weight.abs().sum() == 0
