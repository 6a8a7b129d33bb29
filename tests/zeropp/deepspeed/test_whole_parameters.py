"""Between steps, at ZeRO stages 0 to 2, parameters are whole and plain; state dicts always are."""

import copy
import io
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.megatron_zpp.interchange.foreign_models import llama
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import SAMPLES, engine_of, gathered_parameters, run
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine, InputError
from zeropp.deepspeed import whole_state_dicts
from zeropp.deepspeed.utils import safe_get_full_fp32_param
from zeropp.deepspeed.zero import GatheredParameters

BF16, FP16 = ({name: {"enabled": True}} for name in ("bf16", "fp16"))
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
QUANTIZED = {"stage": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
SETTINGS = {
    "stage 0": dict(stage=0),
    "stage 0, bf16": dict(stage=0, **BF16),
    "stage 1, bf16, two micro-batches": dict(stage=1, micro_batches=2, **BF16),
    "stage 2": dict(stage=2),
    "stage 2, offloaded": dict(zero_optimization=OFFLOADED, **BF16),
    "stage 2, qwZ": dict(zero_optimization=QUANTIZED, **BF16),
}
NAME, OTHER = "blocks.1.up.weight", "blocks.0.down.weight"
of_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def is_plain(model: nn.Module) -> bool:
    return all(type(each) is nn.Parameter for each in model.parameters())


def masters_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {n: safe_get_full_fp32_param(each) for n, each in engine.module.named_parameters()}


def half_a_step(engine: Engine) -> None:
    tokens = tokens_of(3, SAMPLES).chunk(dist.get_world_size())[dist.get_rank()]
    engine.backward(loss_of(engine, tokens.chunk(engine.gradient_accumulation_steps())[0]))
    engine.step()


@of_settings
@ranks(2)
def test_they_hold_what_forward_computes_with_and_stay_the_same_objects(settings):
    engine = engine_of(**settings)
    start = dict(small_model().named_parameters())
    held = dict(engine.module.named_parameters())
    dtype = engine.sharding.compute_dtype
    is_exact = "zero_quantized_weights" not in engine.config["zero_optimization"]
    for steps in (0, 2):
        run(engine, steps=steps)
        assert is_plain(engine.module) and is_plain(engine)
        for name, weight in engine.module.named_parameters():
            assert weight is held[name] and weight.dtype == dtype and weight.requires_grad
            assert weight.detach().float().cpu().numpy().shape == start[name].shape
            assert (weight.detach() @ torch.ones(weight.shape[-1], dtype=dtype)).isfinite().all()
            average = torch.zeros_like(weight).lerp_(weight.detach(), 0.5)
            assert torch.allclose(average, weight.detach() / 2)
            if steps == 0 and is_exact:
                assert torch.equal(weight, start[name].to(dtype))
            master = safe_get_full_fp32_param(weight)
            tolerance = 0 if is_exact else master.abs().max().item() / 64  # half a code of INT8
            torch.testing.assert_close(weight, master.to(dtype), rtol=0, atol=tolerance)
    if engine.gradient_accumulation_steps() == 2:
        half_a_step(engine)
        assert is_plain(engine.module)
    with torch.no_grad():
        loss_of(engine, tokens_of(0))
        assert is_plain(engine.module)


@ranks(2)
def test_after_a_backward_pass_they_are_freed_until_the_step_or_zero_grad():
    engine = engine_of(stage=1)
    held = [*engine.module.parameters()]
    values = held[0].detach().numpy()
    before = values.copy()
    engine.backward(loss_of(engine, tokens_of(1)))
    assert (values == before).all()
    assert all(isinstance(each, DTensor) for each in engine.module.parameters())
    for parameter in held:
        assert parameter.isnan().all() and parameter.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            parameter.mul_(2)
    for end in (engine.step, engine.zero_grad):
        end()
        for parameter, now in zip(held, engine.module.parameters(), strict=True):
            assert parameter is now and parameter.isfinite().all()
        before = [parameter.detach().clone() for parameter in held]
        engine.backward(loss_of(engine, tokens_of(1)))
    engine.zero_grad()
    assert all(map(torch.equal, before, held))


@pytest.mark.parametrize("settings", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
@ranks(2)
def test_a_step_uses_gradients_that_a_program_sets(stage, settings):
    engine = engine_of(
        stage=stage,
        gradient_clipping=0.0,
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        **settings,
    )
    before = masters_of(engine)
    for parameter in engine.module.parameters():
        parameter.grad = torch.arange(parameter.numel()).view_as(parameter).to(parameter.dtype)
    expected = [parameter.grad.float() for parameter in engine.module.parameters()]
    engine.step()
    for gradient, start, now in zip(
        expected, before.values(), masters_of(engine).values(), strict=True
    ):
        assert torch.equal(now, start - gradient)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


@ranks(2)
def test_one_rank_generates_alone():
    engine = engine_of(llama(), stage=1)
    arguments = {"input_ids": tokens_of(0)[:2, :6], "max_new_tokens": 4, "do_sample": False}
    if dist.get_rank() == 0:
        expected = llama().eval().generate(**arguments)
        assert torch.equal(engine.eval().generate(**arguments), expected)


@ranks(2)
def test_a_step_that_is_skipped_leaves_them_whole_and_as_they_were():
    engine = engine_of(stage=2, fp16={"enabled": True, "initial_scale_power": 40})
    before = [each.detach().clone() for each in engine.module.parameters()]
    engine.module.get_parameter(NAME).data.mul_(2)
    run(engine, steps=1)
    assert engine.skipped_steps == 1 and is_plain(engine.module)
    names = (name for name, _ in engine.module.named_parameters())
    for name, old, new in zip(names, before, engine.module.parameters(), strict=True):
        assert torch.equal(new, old * (1 + (name == NAME)))


@ranks(2)
def test_frozen_moved_and_misused():
    engine = engine_of(stage=2)
    for parameter in engine.module.blocks[0].parameters():
        parameter.requires_grad_(False)
    before = masters_of(engine) | {OTHER: engine.module.get_parameter(OTHER).detach().clone()}
    run(engine, steps=1)
    assert torch.equal(engine.module.get_parameter(OTHER), before[OTHER])
    assert not torch.equal(engine.module.get_parameter(NAME), before[NAME])
    engine.module.to("cpu").float()
    assert is_plain(engine.module)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    with pytest.raises(InputError, match="the optimizer holds embedding.weight as it was gathered"):
        optimizer.step()
    with GatheredParameters(engine.module.parameters(), modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.ones_(engine.module.embedding.weight)
    assert bool((safe_get_full_fp32_param(engine.module.embedding.weight) == 1).all())


@pytest.mark.parametrize("zero", [{"stage": 1}, QUANTIZED], ids=["stage 1", "stage 2, qwZ"])
@ranks(2)
def test_the_gather_is_moved_and_none_is_added(zero):
    engine = engine_of(zero_optimization=zero, **BF16)
    expected = engine.sharding.expected_traffic()
    start = dict(engine.sharding.traffic.sent)
    run(engine, steps=3)
    for key, count in engine.sharding.traffic.sent.items():
        assert count - start.get(key, 0) == 3 * expected.get(key, 0)


BF16 = {"bf16": {"enabled": True}}
OFFLOADED_3 = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
HPZ = {"stage": 3, "zero_hpz_partition_size": 2}
DELAYED = {"delayed_param_update": True, "delayed_param_update_warmup": 0}


class TiedNames(nn.Module):
    """The small model whose embedding has a second name, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()
        self.head = nn.Module()
        self.head.weight = self.model.embedding.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def saved(state: dict) -> dict:
    """What another process reads of a state dict."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("stage", [0, 1])
@ranks(2)
def test_below_stage_3_one_rank_saves_alone(stage):
    engine = engine_of(TiedNames(), stage=stage, **BF16)
    run(engine, steps=1)
    masters = gathered_parameters(engine.module)
    if dist.get_rank() == 0:
        state = engine.module.state_dict()
        assert state.keys() == TiedNames().state_dict().keys()
        assert all(type(value) is torch.Tensor for value in state.values())
        assert state["head.weight"].data_ptr() == state["model.embedding.weight"].data_ptr()
        assert state["head.weight"].float().numpy().shape == (37, 12)
        plain = TiedNames()
        plain.load_state_dict(saved(state))
        for name, weight in plain.named_parameters():
            assert state[name].dtype == torch.bfloat16 and torch.equal(weight, masters[name])
        blocks = engine.module.model.blocks
        assert torch.equal(blocks.state_dict()["1.up.bias"], masters["model.blocks.1.up.bias"])
    kept = engine.module.state_dict(keep_vars=True)
    assert all(kept[name] is each for name, each in engine.module.named_parameters())
    run(engine, steps=1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(zero_optimization=OFFLOADED_3),
        dict(zero_optimization=OFFLOADED_3, zeropp=DELAYED),
        dict(zero_optimization=HPZ),
    ],
    ids=["offloaded", "delayed", "hpZ"],
)
@ranks(4, ranks_per_node=2)
def test_sharded_weights_are_gathered_as_fp32_masters_and_load_again(settings):
    engine = engine_of(TiedNames(), **settings, **BF16)
    run(engine, steps=1)
    with torch.no_grad():
        loss = loss_of(engine, tokens_of(0))  # leaves weights gathered, in bf16, or copies of them
    state = engine.module.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert state["head.weight"] is state["model.embedding.weight"]
    masters = getattr(engine.optimizer, "masters", {})
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(state[name], masters.get(parameter, parameter).detach().full_tensor())
    assert any((value != value.bfloat16()).any() for value in state.values())
    part = engine.module.model.blocks[1].state_dict()
    assert torch.equal(part["up.weight"], state["model.blocks.1.up.weight"])
    expected = run(engine, steps=2)
    options = StateDictOptions(full_state_dict=True)
    for load in (set_model_state_dict, lambda model, state, **_: model.load_state_dict(state)):
        zeros = {name: torch.zeros_like(value) for name, value in state.items()}
        engine.module.load_state_dict(zeros)
        with torch.no_grad():
            assert loss_of(engine, tokens_of(0)) != loss
        load(engine.module, {name: value.clone() for name, value in state.items()}, options=options)
        with torch.no_grad():
            assert loss_of(engine, tokens_of(0)) == loss or "zeropp" in settings  # is a step late
        again = get_model_state_dict(engine.module, options=options)
        assert all(torch.equal(again[name], value) for name, value in state.items())
    assert run(engine, steps=2) != expected  # with the moments of two more steps


@ranks(3)
def test_a_rank_that_gathers_alone_says_so_and_the_others_go_on():
    engine = engine_of(stage=3, train_batch_size=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_state_dicts, "LIMIT", timedelta(seconds=1))
        for _ in range(2):
            if dist.get_rank() == 0:
                start = time.monotonic()
                with pytest.raises(InputError, match=r"the ranks \[1, 2\] of 3 did not call it"):
                    torch.save(engine.module.state_dict(), io.BytesIO())
                assert 1 <= time.monotonic() - start < 10
        dist.barrier()
        if dist.get_rank() == 2:
            for call in (engine.state_dict, partial(copy.deepcopy, engine.module)):
                with pytest.raises(InputError, match=r"the ranks \[0, 1\] of 3"):
                    call()
        dist.barrier()
    assert whole_state_dicts.LIMIT < timedelta(seconds=30)
    if dist.get_rank() == 0:  # while the others are in GatheredParameters, below
        state = engine.module.state_dict()
        assert state.keys() == small_model().state_dict().keys()
        assert all(type(value) is torch.Tensor and not value.numel() for value in state.values())
        with pytest.raises(InputError, match="copy the model outside, on all ranks"):
            copy.deepcopy(engine.module)
    whole = gathered_parameters(engine.module)
    for name, value in engine.module.state_dict().items():  # of all ranks, however often each tried
        assert torch.equal(value, whole[name])
        assert torch.equal(value, dict(small_model().named_parameters())[name].detach())
