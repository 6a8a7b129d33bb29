"""Between passes a model's modules hold shards, also where a pass left its weights gathered."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharded_training import freeze, shard_on_nodes
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, optimizer_step, shard
from zeropp.deepspeed.zero import GatheredParameters

STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, ALL_THREE]


def look(sharding: Sharding) -> None:
    """A pass without backward."""
    with torch.no_grad():
        loss_of(sharding.model, tokens_of(5))


def trained(sharding: Sharding, optimizer: torch.optim.Optimizer, *, looks: bool) -> list[float]:
    losses = []
    for number in range(2):
        with sharding.micro_step(last=True):
            loss = loss_of(sharding.model, tokens_of(number).chunk(4)[dist.get_rank()])
            loss.backward()
        losses.append(loss.item())
        if looks:
            look(sharding)
        optimizer_step(optimizer, sharding)
    return losses


@pytest.mark.parametrize("zero", STAGES, ids=str)
@ranks(4)
def test_an_optimizer_made_after_a_pass_trains_all_weights(zero):
    def losses(*, looks: bool) -> list[float]:
        sharding = shard_on_nodes(zero)
        if looks:
            look(sharding)
        optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
        return trained(sharding, optimizer, looks=looks)

    assert losses(looks=True) == losses(looks=False)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_weights_frozen_after_a_pass_stay_frozen(stage):
    sharding = shard_on_nodes({"stage": stage})
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    look(sharding)
    freeze(sharding.model.embedding)
    trained(sharding, optimizer, looks=True)
    weight = sharding.model.embedding.weight
    assert torch.equal(weight.full_tensor(), small_model().embedding.weight)
    assert not weight.requires_grad


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_what_is_written_after_a_pass_is_computed_with(stage):
    sharding, plain = shard_on_nodes({"stage": stage}), small_model()
    look(sharding)
    weights = [sharding.model.embedding.weight, sharding.model.blocks[0].up.weight]
    with GatheredParameters(weights[0], modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.constant_(sharding.model.embedding.weight, 0.25)
    look(sharding)
    with torch.no_grad():
        weights[1].fill_(0.5)
        sharding.weights_changed()
        plain.embedding.weight.fill_(0.25)
        plain.blocks[0].up.weight.fill_(0.5)
        expected = loss_of(plain, tokens_of(5))
        assert loss_of(sharding.model, tokens_of(5)) == expected


class SelfTaught(SmallModel):
    """A model that looks at its own output within its forward pass, and again after that."""

    def forward(self, tokens: torch.Tensor, *, teach: bool = True) -> torch.Tensor:
        if not teach:
            return super().forward(tokens)
        with torch.no_grad():
            taught = self(tokens, teach=False)
        return super().forward(tokens) - 0.5 * taught


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}], ids=str)
@ranks(4)
def test_a_pass_within_a_pass_and_one_before_backward(zero):
    def losses(sharding: Sharding) -> list[float]:
        optimizer, values = torch.optim.SGD(sharding.model.parameters(), lr=0.5), []
        for number in range(2):
            loss = loss_of(sharding.model, tokens_of(number))
            with torch.no_grad():
                values.append(loss_of(sharding.model, tokens_of(7)).item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return values

    torch.manual_seed(5)
    expected = losses(shard(SelfTaught(), None, zero_config({"stage": 2})))
    torch.manual_seed(5)
    actual = losses(shard(SelfTaught(), data_mesh(), zero_config(zero)))
    assert actual == pytest.approx(expected, rel=1e-5)  # sums of 4 equal terms, in fp32


@ranks(4)
def test_a_pass_that_was_refused_changes_nothing():
    """Hooks of other parts of the program may raise before ours are called."""

    def refuse(*_: object) -> None:
        raise InputError("not now")

    sharding = shard_on_nodes({"stage": 1})
    hook = sharding.model.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(InputError, match="not now"):
        look(sharding)
    hook.remove()
    look(sharding)
    assert all(isinstance(parameter, DTensor) for parameter in sharding.model.parameters())


class Wrapper(nn.Module):
    """A model around another one, whose `generate` calls that past the wrapper, as PEFT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens).argmax(-1)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_a_model_holds_shards_after_it_generated(stage):
    sharding = shard_on_nodes({"stage": stage}, Wrapper())
    for _ in range(2):
        tokens = sharding.model.generate(tokens_of(0))
        assert all(isinstance(parameter, DTensor) for parameter in sharding.model.parameters())
    assert torch.equal(tokens, Wrapper().generate(tokens_of(0)))
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    trained(sharding, optimizer, looks=False)
    assert not torch.equal(
        sharding.model.inner.embedding.weight.full_tensor(), small_model().embedding.weight
    )


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_weights_stay_gathered_between_passes_without_backward(stage):
    """Evaluation and generation gather what stays whole once."""
    sharding = shard_on_nodes({"stage": stage})
    look(sharding)
    first = sum(sharding.traffic.take().values())
    assert all(isinstance(parameter, DTensor) for parameter in sharding.model.parameters())
    look(sharding)
    again = sum(sharding.traffic.take().values())
    assert again < first and (again == 0) == (stage == 1)


@pytest.mark.parametrize("stage", [1, 3])
@ranks(4)
def test_taking_gathered_weights_for_parameters_is_an_error(stage):
    """They are what modules hold between forward and backward."""
    sharding = shard_on_nodes({"stage": stage})
    loss = loss_of(sharding.model, tokens_of(0))
    optimizer = torch.optim.AdamW(sharding.model.parameters(), lr=1e-2, fused=True)
    with pytest.raises(InputError, match=r"GatheredParameters was given embedding\.weight as it"):
        with GatheredParameters(sharding.model.embedding.weight, modifier_rank=0):
            pass
    loss.backward()
    with pytest.raises(InputError, match=r"embedding\.weight.*gathered.*before the forward pass"):
        optimizer.step()
    with pytest.raises(InputError, match="before the forward pass"):
        optimizer_step(optimizer, sharding)
