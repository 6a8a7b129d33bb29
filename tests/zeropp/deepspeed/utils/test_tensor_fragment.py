"""Reading and writing what an engine holds of a parameter.

Against one process: a plain loop gets the same random writes and takes the same steps. Sums over
the ranks are taken in another order, as in test_engine: 1e-5.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, run
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError
from zeropp.deepspeed import utils

SAME = dict(rtol=1e-4, atol=1e-5)
STATES = ("exp_avg", "exp_avg_sq")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16, FP16 = {"enabled": True}, {"enabled": True, "initial_scale_power": 4}
SETTINGS = {
    "stage 0": dict(stage=0),
    "stage 1 fp16": dict(stage=1, fp16=FP16),
    "stage 2 bf16": dict(stage=2, bf16=BF16),
    "stage 3": dict(stage=3),
    "quantized": dict(zero_optimization=ALL_THREE, bf16=BF16),
    "offloaded": dict(zero_optimization={"stage": 2} | OFFLOAD, bf16=BF16),
    "offloaded weights": dict(
        zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}} | OFFLOAD, fp16=FP16
    ),
    "delayed": dict(
        zero_optimization={"stage": 2} | OFFLOAD,
        bf16=BF16,
        zeropp={"delayed_param_update": True, "delayed_param_update_warmup": 0},
    ),
}


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **SAME)


@pytest.mark.parametrize("name", SETTINGS)
@ranks(2)
def test_what_is_written_is_read_and_trained_on(name):
    engine = engine_of(**SETTINGS[name])
    run(engine, steps=2)
    generator = torch.Generator().manual_seed(7)
    written = {}
    for key, parameter in engine.module.named_parameters():
        written[key] = 0.1 * torch.rand(parameter.shape, generator=generator)
        utils.safe_set_full_fp32_param(parameter, written[key])
        for state in STATES:
            utils.safe_set_full_optimizer_state(parameter, written[key] ** 2, state)
    for key, parameter in engine.module.named_parameters():
        assert torch.equal(utils.safe_get_full_fp32_param(parameter), written[key])
        for state in STATES:
            held = utils.safe_get_full_optimizer_state(parameter, state)
            assert torch.equal(held, written[key] ** 2)
            rows = utils.safe_get_local_optimizer_state(parameter, state)
            utils.safe_set_local_optimizer_state(parameter, 2 * rows, state)
            held = utils.safe_get_full_optimizer_state(parameter, state)
            assert torch.equal(held, 2 * written[key] ** 2)
    fresh = small_model()
    fresh.load_state_dict(written)
    other = engine_of(fresh, **SETTINGS[name])
    with torch.no_grad():
        assert torch.equal(loss_of(engine, tokens_of(3)), loss_of(other, tokens_of(3)))
    scale = engine.loss_scale
    mine = tokens_of(3).chunk(2)[dist.get_rank()]
    engine.backward(loss_of(engine, mine))
    other.backward(loss_of(other, mine))
    for ours, theirs in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        gradient = utils.safe_get_full_grad(ours)
        assert torch.equal(gradient, utils.safe_get_full_grad(theirs)) and gradient.any()
        utils.safe_set_local_grad(ours, torch.zeros_like(utils.safe_get_local_grad(ours)))
    utils.safe_update_full_grad_vectorized(
        engine.module.parameters(), lambda gradient, parameter: gradient + scale
    )
    engine.step()
    norm = sum(parameter.numel() for parameter in fresh.parameters()) ** 0.5
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6)


@ranks(2)
def test_gradients_before_they_are_averaged_are_this_ranks():
    def gradients(passes: int) -> list[torch.Tensor]:
        engine = engine_of(stage=1)
        mine = tokens_of(0).chunk(2)[dist.get_rank()]
        with engine.no_sync():
            for tokens in mine.chunk(2)[:passes]:
                engine.backward(loss_of(engine, tokens))
            found = [utils.safe_get_full_grad(each) for each in engine.module.parameters()]
            utils.safe_set_full_grad(engine.module.embedding.weight, 0 * found[0])
            assert not utils.safe_get_full_grad(engine.module.embedding.weight).any()
        return found

    plain = small_model()
    for passes in (1, 2):
        loss_of(plain, tokens_of(0).chunk(2)[dist.get_rank()].chunk(2)[passes - 1]).backward()
        for ours, theirs in zip(gradients(passes), plain.parameters(), strict=True):
            assert_same(ours, theirs.grad)


@ranks(2)
def test_frozen_scalar_and_foreign_parameters():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(()))
            self.first.bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * self.scale

    engine = engine_of(Scaled())
    frozen, weight = engine.first.bias, engine.first.weight
    scale = engine.module.scale  # `engine.scale` is a method
    assert utils.safe_get_full_fp32_param(frozen) is utils.safe_get_full_grad(frozen) is None
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    utils.safe_set_full_fp32_param(scale, torch.tensor(3.0))
    output = engine(torch.ones(1, 3))
    with torch.no_grad():
        plain = torch.ones(1, 3) @ weight.full_tensor().T + frozen.full_tensor()
    torch.testing.assert_close(output.detach(), 3 * plain)
    engine.backward(output.sum())
    assert utils.safe_get_full_grad(scale).item() == pytest.approx(output.sum().item() / 3)
    engine.step()
    assert utils.safe_get_full_optimizer_state(scale, "exp_avg") is not None
    for wrong, message in (
        (
            lambda: utils.safe_get_full_grad(nn.Parameter(torch.ones(2))),
            "is not one of an engine's",
        ),
        (lambda: utils.safe_set_full_grad(weight, torch.ones(3, 3)), "no gradient to set"),
        (
            lambda: utils.safe_set_full_fp32_param(weight, torch.ones(2)),
            r"is \[2\]: exp.* \[3, 3\]",
        ),
        (lambda: utils.safe_set_full_fp32_param(weight, 1.0), "is float: expected"),
        (lambda: utils.safe_set_local_fp32_param(weight, torch.ones(3, 3)), "this rank's part"),
    ):
        with pytest.raises(InputError, match=message):
            wrong()
    with zeropp.zero.GatheredParameters(weight):
        with pytest.raises(InputError, match="inside GatheredParameters"):
            utils.safe_get_full_fp32_param(weight)
