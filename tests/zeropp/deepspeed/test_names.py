"""DeepSpeed's modules under `zeropp.deepspeed`: names that programs import, and what they do."""

import argparse
import importlib
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.launched import ROOT
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import config_of, engine_of, logged, run
from tests.zeropp.small_model import Block, small_model
from zeropp import InputError, deepspeed
from zeropp.deepspeed import names, utils
from zeropp.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zeropp.deepspeed.runtime.utils import see_memory_usage


def test_every_public_name_is_where_deepspeed_has_it():
    for name in deepspeed.__all__:
        assert getattr(deepspeed, name) is not None
    assert deepspeed.initialize is zeropp.initialize
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is zeropp.Engine
    assert deepspeed.get_accelerator is deepspeed.accelerator.get_accelerator
    parameters = importlib.import_module("zeropp.deepspeed.runtime.zero.partition_parameters")
    assert parameters.Init is zeropp.zero.Init is deepspeed.zero.Init
    schedules = deepspeed.runtime.lr_schedules
    for name in schedules.VALID_LR_SCHEDULES:
        assert getattr(schedules, name).__name__ == name
    assert schedules.CYCLE_MAX_LR == "cycle_max_lr" and schedules.TOTAL_NUM_STEPS in str(
        inspect.signature(schedules.WarmupDecayLR)
    )
    assert deepspeed.utils.logger.name == "zeropp"
    assert not deepspeed.utils.z3_leaf_module(nn.Linear(1, 1))  # no module of that name
    with pytest.raises(AttributeError, match="no 'pype'"):
        _ = deepspeed.pype


def test_names_that_are_elsewhere():
    for module, places in names.ELSEWHERE.items():
        own = importlib.import_module(f"zeropp.deepspeed.{module}".rstrip("."))
        for given in places.values():
            for name in given:
                if name != "*":
                    assert hasattr(own, name.partition("=")[0]), f"{module}: {name}"
    fused = importlib.import_module("zeropp.deepspeed.ops.adam.fused_adam")
    assert fused.FusedAdam is FusedAdam and deepspeed.comm.comm.ReduceOp is dist.ReduceOp
    assert importlib.import_module("zeropp.deepspeed.git_version_info").version.endswith("+zeropp")


def test_names_of_features_that_are_not_here_refuse_when_they_are_used():
    page = " ".join((ROOT / "docs/deepspeed.md").read_text().split())
    for dotted, reason in names.REFUSED.items():
        assert reason in page
        module, _, name = f"zeropp.deepspeed.{dotted}".rpartition(".")
        if dotted in names.MODULES:
            module, name = f"{module}.{name}", "Any"
            dotted += ".Any"
        with pytest.raises(NotImplementedError, match=re.escape(f"deepspeed.{dotted} is not")):
            getattr(importlib.import_module(module), name)()
    layer = importlib.import_module("zeropp.deepspeed.moe.layer")

    class Experts(layer.MoE):
        """As programs derive from DeepSpeed's classes."""

    for kind in (Experts, layer.MoE):
        with pytest.raises(InputError, match="moe.layer.MoE is not available here: experts are"):
            kind(8, None)
    assert not isinstance(nn.Linear(1, 1), layer.MoE)


def test_what_programs_import_and_seldom_use(capsys):
    utils = importlib.import_module("zeropp.deepspeed.moe.utils")
    group = {"params": [nn.Parameter(torch.ones(1))], "name": "all"}
    assert utils.split_params_into_different_moe_groups_for_optimizer(group) == [group]
    group["params"][0].allreduce = False
    with pytest.raises(InputError, match="AutoEP"):
        utils.split_params_into_different_moe_groups_for_optimizer(group)
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    helper = importlib.import_module("zeropp.deepspeed.compression.helper")
    model = small_model()
    helper.recursive_setattr(model, "blocks.1.up", layer)
    assert helper.recursive_getattr(model, "blocks.1.up") is layer
    stage3 = importlib.import_module("zeropp.deepspeed.runtime.zero.stage3")
    stage3.estimate_zero3_model_states_mem_needs_all_live(small_model(), 8, 2)
    assert "2 x 8 GPUs" in capsys.readouterr().out


def test_the_configuration_as_an_object():
    config = deepspeed.DeepSpeedConfig({"train_batch_size": 8, "bf16": {"enabled": True}})
    assert config.train_micro_batch_size_per_gpu == 8 and config.gradient_accumulation_steps == 1
    assert config.bfloat16_config.enabled and config.zero_optimization_stage == 0
    with pytest.raises(AssertionError, match="train_batch_size = 8"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 3})
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.DeepSpeedConfig({"checkpoint": {"tag_validation": "never"}})
    zero = importlib.import_module("zeropp.deepspeed.runtime.zero.config")
    section = zero.DeepSpeedZeroConfig(stage=3, param_persistence_threshold=5, cpu_offload=True)
    assert section.stage3_param_persistence_threshold == section.param_persistence_threshold == 5
    assert section.offload_optimizer.device == "cpu" and section.offload_param is None


def test_the_flags_that_deepspeed_adds():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args("--deepspeed --deepspeed_config ds.json".split())
    assert args.deepspeed and args.deepspeed_config == "ds.json"
    assert not parser.parse_args([]).deepspeed


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_the_cpu_as_an_accelerator():
    accelerator = deepspeed.get_accelerator()
    accelerator.set_device(1)
    assert accelerator.device_name(1) == accelerator.current_device_name() == "cpu"
    assert accelerator.device() == accelerator.device(0) == torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, str(2 * name.endswith("SIZE")))
        assert accelerator.is_available() and accelerator.device_count() == 2
    assert accelerator.communication_backend_name() == "gloo"
    assert accelerator.on_accelerator(torch.ones(1))
    assert accelerator.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    accelerator.synchronize()  # of torch.cpu


def test_memory_is_printed_only_if_that_is_asked_for(capsys):
    see_memory_usage("before")
    assert not capsys.readouterr().out
    see_memory_usage("before", force=True)
    text = capsys.readouterr().out
    assert text.startswith("before\n") and re.search(r"CPU memory that is free: \d+\.\d\d GB", text)


def test_recomputed_activations_have_the_same_gradients():
    """Dropout draws the same numbers when a layer is computed again."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
    gradients, calls = [], []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    for wrap in (lambda function, x: function(x), deepspeed.checkpointing.checkpoint):
        torch.manual_seed(1)
        layer.zero_grad()
        wrap(layer, torch.ones(4, 8, requires_grad=True)).sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(*gradients) and len(calls) == 3 and deepspeed.checkpointing.is_configured()
    with logged() as lines:
        deepspeed.checkpointing.configure(None, partition_activations=True, profile=False)
    assert len(lines) == 1 and "configure(partition_activations) has no effect here" in lines[0]
    deepspeed.checkpointing.reset()


@ranks(2)
def test_messages_of_some_ranks():
    with logged() as lines:
        deepspeed.utils.log_dist("one", ranks=[1])
        deepspeed.utils.log_dist("all", ranks=[-1])
    own = dist.get_rank()
    assert lines == ["[Rank 1] one"] * own + [f"[Rank {own}] all"]


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
def test_adam_with_deepspeeds_defaults(kind):
    weight, expected = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    ours, torchs = kind([weight], lr=0.1), torch.optim.AdamW([expected], lr=0.1, weight_decay=0.0)
    for optimizer, parameter in ((ours, weight), (torchs, expected)):
        for step in range(3):
            parameter.grad = torch.full((8,), float(step))
            optimizer.step()
    torch.testing.assert_close(weight, expected)
    with pytest.raises(InputError, match="amsgrad"):
        kind([weight], amsgrad=True)


@ranks(2)
def test_deepspeeds_adam_may_be_offloaded():
    losses = {}
    for kind, place in ((FusedAdam, "none"), (DeepSpeedCPUAdam, "cpu"), (FusedAdam, "cpu")):
        zero = {"stage": 2, "offload_optimizer": {"device": place}}
        model = small_model()
        config = {"train_batch_size": 4, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=kind(model.parameters(), lr=1e-2), config=config
        )
        losses[kind, place] = run(engine, 3)
    assert len({tuple(each) for each in losses.values()}) == 1


@ranks(2)
def test_what_programs_ask_the_engine():
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "steps_per_print": float("inf"),  # as accelerate writes "never"
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    engine, *_ = deepspeed.initialize(model=small_model(), config=config)
    assert engine.config.get("zero_optimization", {}).get("stage") == 3
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.zero_gather_16bit_weights_on_model_save()
    engine.module.blocks[1].requires_grad_(False)
    weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    everything = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank():
        assert weights is everything is None
    else:
        assert {value.dtype for value in everything.values()} == {torch.bfloat16}
        frozen = everything.keys() - weights.keys()
        assert frozen and all(name.startswith("blocks.1") for name in frozen)
    engine.tput_timer.update_epoch_count()
    engine.destroy()
    assert engine.optimizer is None


@ranks(2)
def test_a_checkpoint_without_frozen_weights(tmp_path):
    def engine_of(seed: int) -> zeropp.Engine:
        torch.manual_seed(seed)
        model = small_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
        model.blocks[1].requires_grad_(False)
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
        config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "optimizer": optimizer}
        return deepspeed.initialize(model=model, config=config)[0]

    engine = engine_of(1)
    run(engine, 2)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other = engine_of(2)
    with pytest.raises(InputError, match=r"(?s)another model.*blocks\.1"):
        other.load_checkpoint(tmp_path)
    frozen = other.module.blocks[1].up.weight.full_tensor()
    other.load_checkpoint(tmp_path, load_module_strict=False)
    assert torch.equal(other.module.blocks[1].up.weight.full_tensor(), frozen)
    trained = engine.module.blocks[0].up.weight.full_tensor()
    assert torch.equal(other.module.blocks[0].up.weight.full_tensor(), trained)


@ranks(2)
def test_copies_of_a_state_dict_are_whole_and_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    )
    gathered = [None] * 2
    dist.all_gather_object(gathered, expected)
    copies = clone_tensors_for_torch_save({"list": [engine.module.state_dict(), 7]})
    assert copies["list"][1] == 7
    for name, value in copies["list"][0].items():
        assert torch.equal(value, gathered[0][name])
    if dist.get_rank() == 0:
        assert copies["list"][0]["0.weight"] is copies["list"][0]["2.weight"]


@ranks(2)
def test_models_that_differ_between_ranks_are_named():
    sizes = (3, 5 + dist.get_rank())
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(*sizes))
    message = r"zeropp.initialize: 1.weight is \[5, 3\] .* on rank 0 and \[6, 3\] .* on rank 1"
    with pytest.raises(InputError, match=message):
        deepspeed.initialize(model=model, config={"train_batch_size": 2})


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
