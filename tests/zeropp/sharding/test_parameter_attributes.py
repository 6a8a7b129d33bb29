"""Attributes and hooks of parameters survive sharding, or are refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, run
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError, shard
from zeropp.deepspeed.zero import Init

LIMIT = 1e-3


class Tagged(SmallModel):
    """The small model; its parameters have tags, which its forward pass reads, and one a hook."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.tag = name
        hook = self.blocks[1].up.weight.register_hook(self.clamped)
        self.gradients_seen, self.handle, self.tags = [], hook, []
        self.blocks[1].up.register_forward_pre_hook(
            lambda module, _: self.tags.append(module.weight.tag)
        )

    def clamped(self, gradient: torch.Tensor) -> torch.Tensor:
        self.gradients_seen.append(gradient.shape)
        return gradient.clamp(-LIMIT, LIMIT)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tags.append(self.embedding.weight.tag)
        return super().forward(tokens)


def tagged() -> Tagged:
    torch.manual_seed(5)
    return Tagged()


def check_tags(model: Tagged) -> None:
    assert all(parameter.tag == name for name, parameter in model.named_parameters())
    assert model.tags[:2] == ["embedding.weight", "blocks.1.up.weight"]


@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_a_hook_sees_each_ranks_whole_gradient(stage):
    """As with DDP: the mean over ranks is taken of what the hook returns."""
    means = []
    for tokens in tokens_of(0).chunk(2):
        plain = tagged()
        loss_of(plain, tokens).backward()
        means.append(plain.blocks[1].up.weight.grad)
    assert all(mean.abs().max() == LIMIT for mean in means)
    sharding = shard(tagged(), data_mesh(), zero_config({"stage": stage}))
    model = sharding.model
    with sharding.micro_step(last=True):
        loss_of(model, tokens_of(0).chunk(2)[dist.get_rank()]).backward()
    weight = model.blocks[1].up.weight
    assert torch.equal(weight.grad.full_tensor(), (means[0] + means[1]) / 2)
    check_tags(model)
    assert model.gradients_seen == [(19, 12)]
    model.handle.remove()
    later = []
    weight.register_hook(lambda gradient: later.append(gradient.shape))
    with sharding.micro_step(last=True):
        loss_of(model, tokens_of(0)).backward()
    assert model.gradients_seen == later == [(19, 12)]


@ranks(2)
def test_models_that_are_recorded_offloaded_or_loaded(tmp_path):
    host = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    for settings in (dict(bf16={"enabled": True}), dict(zero_optimization=host)):
        with Init():
            model = tagged()
        engine = engine_of(model, **settings)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        run(engine, 1)
        check_tags(engine.module)
        assert engine.module.gradients_seen == [(19, 12)]


@ranks(2)
def test_hooks_after_accumulation_are_refused_before_sharding():
    model = small_model()
    model.blocks[0].up.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InputError, match=r"blocks\.0\.up\.bias has a hook.*post_accumulate"):
        shard(model, data_mesh(), zero_config({"stage": 3}))
    with Init():
        recorded = small_model()
        recorded.blocks[0].up.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InputError, match=r"blocks\.0\.up\.bias has a hook.*post_accumulate"):
        engine_of(recorded)


@ranks(1)
def test_one_rank_that_is_not_sharded_keeps_all_hooks():
    model = tagged()
    seen = []
    model.blocks[0].up.bias.register_post_accumulate_grad_hook(seen.append)
    engine = engine_of(model)
    run(engine, 1)
    assert seen == [model.blocks[0].up.bias] and model.gradients_seen == [(19, 12)]
    assert isinstance(model.blocks[0].up.bias, nn.Parameter) and zeropp.Engine is type(engine)
