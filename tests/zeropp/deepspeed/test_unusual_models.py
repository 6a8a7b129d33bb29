"""Models that trainers' own tests use: scalars, parts that are used late, states loaded in place.

Losses are those of a plain loop; sums over the ranks are in another order, as in test_engine: 1e-5.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, run
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError, deepspeed
from zeropp.deepspeed.ops.adam import DeepSpeedCPUAdam

SAME = 1e-5
ADAM = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


class Line(nn.Module):
    """Two scalars and nothing else, as accelerate's regression model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a + self.b


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_a_model_of_scalars(stage, format):
    x = torch.arange(8.0).view(8, 1) / 8
    plain, losses = Line(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(3):
        loss = plain(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(
        Line(), stage=stage, optimizer=ADAM, gradient_clipping=0.0, **FORMATS[format]
    )
    ours = []
    for _ in range(3):
        loss = engine(x.chunk(2)[dist.get_rank()]).float().square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        ours.append(total.item() / 2)
    # In bf16 an output, of at most 5, is rounded to 8 bits: 2^-8 relative in its square.
    assert ours == pytest.approx(losses, rel=SAME if format == "fp32" else 3 * 2**-8)


@ranks(1)
def test_a_model_has_one_engine():
    for make in (Line, small_model):
        model = make()
        engine = engine_of(model)
        with pytest.raises(InputError, match="sharded already, by an earlier call: go on with the"):
            engine_of(model)
        assert engine.module is model


class Late(SmallModel):
    """Uses its last block from the third step on."""

    steps = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.steps += 1
        x = self.embedding(tokens)
        for block in self.blocks if self.steps > 2 else self.blocks[:-1]:
            x = block(x)
        return nn.functional.linear(x, self.embedding.weight)


def late() -> Late:
    torch.manual_seed(5)
    return Late()


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_a_parameter_that_is_not_used_at_first(stage):
    plain, losses = late(), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(5):
        loss = loss_of(plain, tokens_of(step))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert run(engine_of(late(), stage=stage), steps=5) == pytest.approx(losses, rel=SAME)


@pytest.mark.parametrize("settings", ["plain", "offloaded"])
@ranks(2)
def test_a_state_loaded_inside_gathered_parameters(settings, tmp_path):
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    more = {"zero_optimization": offload} if settings == "offloaded" else {}
    expected = run(engine_of(**more), steps=2)
    state = small_model().state_dict()
    blank = small_model()
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.fill_(0.25)
    engine = engine_of(blank, **more)
    with zeropp.zero.GatheredParameters([*engine.module.parameters()], modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.load_state_dict(state)
    assert run(engine, steps=2) == expected
    engine.save_checkpoint(tmp_path)
    with zeropp.zero.GatheredParameters([*engine.module.parameters()]):
        for call in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(InputError, match="_checkpoint inside GatheredParameters"):
                call(tmp_path)
    assert engine.load_checkpoint(tmp_path)[0] == tmp_path / "global_step2"


@pytest.mark.parametrize("stage", [0, 3])
@ranks(2)
def test_an_engine_made_inside_the_context_that_records_a_model(stage):
    expected = run(engine_of(stage=stage), steps=2)
    with deepspeed.zero.Init():
        torch.manual_seed(5)
        engine = engine_of(SmallModel(), stage=stage)
        with deepspeed.zero.Init():
            other = SmallModel()
    assert run(engine, steps=2) == expected
    run(engine_of(other, stage=stage), steps=1)


@pytest.mark.parametrize("writer", [0, 1])
@ranks(2)
def test_what_a_rank_writes_before_the_model_is_sharded(writer):
    with deepspeed.zero.Init():
        model = small_model()
    weight = model.blocks[0].up.weight
    with zeropp.zero.GatheredParameters(weight, modifier_rank=writer):
        if dist.get_rank() == writer:
            nn.init.constant_(weight, 7.0 + writer)
    engine = engine_of(model)
    assert gathered_parameters(engine.module)["blocks.0.up.weight"].unique().tolist() == [
        7 + writer
    ]


@pytest.mark.parametrize("stage", range(4))
@ranks(2)
def test_weights_of_several_dtypes(stage):
    model = small_model()
    model.blocks[0].to(torch.bfloat16)
    model.blocks[1].norm.to(torch.float16)
    engine = engine_of(model, stage=stage, bf16={"enabled": True})
    losses = run(engine, steps=4)
    assert losses[-1] < losses[0] and engine.was_step_applied()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [22, 64, 1024])
def test_deepspeeds_adam_on_16_bit_parameters_of_the_cpu(size, dtype):
    """Against one in fp32 that is rounded after each step, as the parameter is."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(size).to(dtype))
    reference = nn.Parameter(weight.detach().float())
    ours, theirs = DeepSpeedCPUAdam([weight]), torch.optim.AdamW([reference], weight_decay=0.0)
    for _ in range(10):
        weight.grad = torch.randn(size).to(dtype)
        reference.grad = weight.grad.float()
        ours.step()
        theirs.step()
        reference.data = reference.data.to(dtype).float()
    # A tie may be rounded to either side, once in a step: an ulp of the largest weight each.
    ulp = torch.finfo(dtype).eps * weight.detach().abs().max().item()
    torch.testing.assert_close(weight.detach().float(), reference.detach(), rtol=0, atol=10 * ulp)
