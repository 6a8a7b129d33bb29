"""Between passes a model's modules hold shards, also where a pass left its weights gathered."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE, data_mesh, zero_config
from tests.zeropp.sharded_training import shard_on_nodes
from tests.zeropp.small_model import SmallModel, loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, optimizer_step, shard
from zeropp.deepspeed.zero import GatheredParameters


def look(sharding: Sharding) -> None:
    """A pass without backward."""
    with torch.no_grad():
        loss_of(sharding.model, tokens_of(5))


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
    with sharding.micro_step(last=True):
        loss_of(sharding.model, tokens_of(0)).backward()
    optimizer_step(optimizer, sharding)
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


class OutOfMemory(RuntimeError):
    pass


def fail_once(*_: object) -> None:
    raise OutOfMemory


def micro_batch(sharding: Sharding, index: int, *, last: bool) -> torch.Tensor:
    tokens = tokens_of(index).chunk(4)[dist.get_rank()]
    with sharding.micro_step(last=last):
        loss = loss_of(sharding.model, tokens)
        loss.backward()
    return loss


def gradients(sharding: Sharding) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in sharding.model.parameters()]


def undisturbed(zero: dict) -> list[torch.Tensor]:
    sharding = shard(small_model(), data_mesh(), zero_config(zero, 2))
    for index in range(2):
        micro_batch(sharding, index, last=index == 1)
    return gradients(sharding)


def require_equal(sharding: Sharding, expected: list[torch.Tensor]) -> None:
    for gradient, other in zip(gradients(sharding), expected, strict=True):
        assert torch.equal(gradient, other) and torch.isfinite(other).all()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 3}, ALL_THREE], ids=str)
@ranks(4)
def test_passes_that_failed_are_said_and_repeated(zero: dict):
    sharding = shard(small_model(), data_mesh(), zero_config(zero, 2))
    micro_batch(sharding, 0, last=False)
    handle = sharding.model.blocks[1].up.register_forward_pre_hook(fail_once)
    with pytest.raises(OutOfMemory):
        micro_batch(sharding, 1, last=True)
    handle.remove()
    micro_batch(sharding, 1, last=True)
    require_equal(sharding, undisturbed(zero))
    sharding.discard_gradients()
    micro_batch(sharding, 0, last=False)
    handle = sharding.model.blocks[1].norm.register_full_backward_hook(fail_once)
    with pytest.raises(OutOfMemory):
        micro_batch(sharding, 1, last=True)
    handle.remove()
    with pytest.raises(InputError, match="gradients of this step are incomplete"):
        micro_batch(sharding, 1, last=True)
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="gradients of this step are incomplete"):
        optimizer_step(optimizer, sharding)
    sharding.discard_gradients()
    for index in range(2):
        micro_batch(sharding, index, last=index == 1)
    require_equal(sharding, undisturbed(zero))
