"""Weights that were gathered before a change are not used after it, at any stage."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharded_training import (
    BOTH,
    QWZ,
    evaluate,
    load_random_weights,
    random_like,
    shard_on_nodes,
    step,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of


@ranks(4)
def test_two_models_that_train_in_turn():
    """DeepSpeed issues #4901 #7066: two models in a process; here each feeds the other's loss."""

    def losses(zero: dict) -> list[float]:
        maker, judge = (shard_on_nodes(zero, small_model()) for _ in range(2))
        steppers = [
            torch.optim.SGD(sharding.model.parameters(), lr=0.3) for sharding in (maker, judge)
        ]
        values = []
        for number in range(2):
            tokens = tokens_of(number).chunk(4)[dist.get_rank()]
            for mine, other, stepper in ((maker, judge, 0), (judge, maker, 1)):
                with torch.no_grad():
                    target = other.model(tokens).float().softmax(-1)
                other.release()
                with mine.micro_step(last=True):
                    loss = (mine.model(tokens).float() * (1 - target)).mean()
                    loss.backward()
                steppers[stepper].step()
                steppers[stepper].zero_grad()
                values.append(loss.item())
        return values

    assert losses(BOTH) == losses(QWZ)
    expected = losses({"stage": 0})
    for stage in (1, 2, 3):
        assert losses({"stage": stage}) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(4)
def test_one_model_steps_between_the_other_s_forward_and_backward(stage):
    def losses(zero: dict) -> list[float]:
        first, second = (shard_on_nodes(zero, small_model()) for _ in range(2))
        steppers = [
            torch.optim.SGD(sharding.model.parameters(), lr=0.3) for sharding in (first, second)
        ]
        tokens, values = tokens_of(0).chunk(4)[dist.get_rank()], []
        for _ in range(2):
            with first.micro_step(last=True), second.micro_step(last=True):
                first_loss, second_loss = (
                    loss_of(model.model, tokens) for model in (first, second)
                )
                first_loss.backward()
                steppers[0].step()
                second_loss.backward()
                steppers[1].step()
            values += [first_loss.item(), second_loss.item()]
            for stepper in steppers:
                stepper.zero_grad()
        assert values[0::2] == values[1::2]
        return values

    quantized = losses({"stage": stage, "zero_quantized_weights": True})
    assert stage < 3 or losses(BOTH) == quantized


@pytest.mark.parametrize("zero", [ALL_THREE, {"stage": 3}, {"stage": 2}])
@ranks(4)
def test_a_step_for_each_gradient_within_the_backward_pass(zero):
    """Whole weights that backward still needs stay; what was kept of them does not."""

    def losses_and_bytes(*, within: bool) -> tuple[list[float], dict]:
        sharding = shard_on_nodes(zero)
        weights = list(sharding.model.parameters())
        optimizers = {weight: torch.optim.SGD([weight], lr=0.5) for weight in weights}

        def update(weight: nn.Parameter) -> None:
            optimizers[weight].step()
            optimizers[weight].zero_grad()

        if within:
            for weight in weights:
                weight.register_post_accumulate_grad_hook(update)
        values = []
        for number in range(2):
            with sharding.micro_step(last=True):
                loss = loss_of(sharding.model, tokens_of(number).chunk(4)[dist.get_rank()])
                loss.backward()
            if not within:
                for weight in weights:
                    update(weight)
            values += [loss.item(), evaluate(sharding)]
        return values, sharding.traffic.sent

    losses, sent = losses_and_bytes(within=True)
    expected, usual = losses_and_bytes(within=False)
    assert losses == expected
    assert sent == usual or zero == ALL_THREE  # whose copies the first step of a pass ends


@pytest.mark.parametrize(
    ("zero", "order", "released"),
    [({"stage": 3}, (0,), False), ({"stage": 3}, (2, 1, 0), False), ({"stage": 2}, (0,), False),
     (BOTH, (0, 1, 0), False), (BOTH, (0, 1, 0), True), ({"stage": 3}, (0,), True)],
)  # fmt: skip
@ranks(4)
def test_a_gather_begun_for_a_block_that_was_not_used_is_not_used_later(zero, order, released):
    """What was gathered ahead for a skipped block is older than the weights loaded after it.

    Without `release` it is still under way then, and hpZ must not keep what arrives.
    """
    sharding = shard_on_nodes(zero, small_model(3))
    load_random_weights(sharding, 1)
    sharding.model.order = order
    with torch.no_grad():
        loss_of(sharding.model, tokens_of(5))
    if released:
        sharding.release()
    load_random_weights(sharding, 2)
    sharding.model.order = (0, 1, 2)
    loss = evaluate(sharding)
    other = shard_on_nodes(zero, small_model(3))
    load_random_weights(other, 2)
    assert loss == evaluate(other)


@ranks(4)
def test_a_gather_under_way_when_the_optimizer_steps_is_not_kept():
    def loss_after_step(*, released: bool) -> float:
        sharding = shard_on_nodes(BOTH, small_model(3))
        optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.5)
        loss_of(sharding.model, tokens_of(0)).backward()
        optimizer.step()  # no copies now
        sharding.model.order = (0, 1, 0)
        with torch.no_grad():
            loss_of(sharding.model, tokens_of(1))  # begins to gather the block that it leaves out
        if released:
            sharding.release()
        optimizer.step()
        sharding.model.order = (0, 1, 2)
        return evaluate(sharding)

    assert loss_after_step(released=False) == loss_after_step(released=True)


def halve(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    for weight in weights:
        weight.mul_(0.5)


def approach(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    """As a mean teacher does."""
    for weight in weights:
        weight.lerp_(random_like(weight, 3), 0.3)


def write_shards(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    for weight in weights:
        weight.to_local().mul_(1.5)


def write_on_one_rank(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    if dist.get_rank() == 1:
        write_shards(model, weights, folder)


def write_state(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    for tensor in model.state_dict().values():
        tensor.copy_(random_like(tensor, 4))
        tensor.to_local().mul_(0.9)


def load_submodules(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    for part in (model.blocks[1].up, model.embedding):
        part.load_state_dict({name: random_like(t, 6) for name, t in part.state_dict().items()})


def load_in_place(model: nn.Module, weights: Sequence[nn.Parameter], folder: Path) -> None:
    """As a program that keeps the best weights does."""
    dcp.load(model.state_dict(), checkpoint_id=folder)


IN_PLACE = (halve, approach, write_shards, write_on_one_rank, write_state, load_in_place)
IN_PLACE += (load_submodules,)


@pytest.mark.parametrize(
    ("weight_steps", "writes"), [(False, IN_PLACE), (True, [*IN_PLACE[:3], load_in_place])]
)
@ranks(4)
def test_weights_written_in_place_without_notice_are_seen(weight_steps, writes, tmp_path):
    """By evaluations, by the other micro-batches of a step, and over an optimizer's step."""

    def losses(*, notifies: bool) -> Iterator[float]:
        sharding = shard_on_nodes(BOTH, small_model(), zeropp={"weight_steps": weight_steps})
        model = sharding.model
        weights = [*model.parameters()]
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)
        optimizer = torch.optim.AdamW(weights, lr=1e-2, fused=True)  # raises no version
        for number, write in enumerate(writes):
            yield forward_only(model)
            if number % 2:
                loss_of(model, tokens_of(number)).backward()
            with torch.no_grad():
                write(model, weights, tmp_path)
            if notifies:
                sharding.weights_changed()
            if number == len(writes) // 2:  # one that comes after a backward pass
                optimizer.step()
            yield forward_only(model)
            loss = loss_of(model, tokens_of(1))
            loss.backward()
            yield loss.item()
            optimizer.step()
            optimizer.zero_grad()

    expected = [*losses(notifies=True)]
    assert len({*expected}) > len(writes)  # each write is seen
    assert [*losses(notifies=False)] == expected


def forward_only(model: nn.Module) -> float:
    with torch.no_grad():
        return loss_of(model, tokens_of(5)).item()


@ranks(4)
def test_nothing_is_compared_where_nothing_would_be_reused():
    sharding = shard_on_nodes(BOTH, small_model())
    optimizer, compared = torch.optim.SGD(sharding.model.parameters(), lr=0.5), []
    comparison = sharding.roots[0].kept._of_any_rank
    sharding.roots[0].kept._of_any_rank = lambda flags: compared.append(flags) or comparison(flags)
    for number in range(3):
        step(sharding, optimizer, number)
    assert not compared
    step(sharding, optimizer, 4, micro_batches=3)
    assert compared == 2 * [[False] * 3]  # as the second and third reuse copies of three units


@ranks(4)
def test_a_part_of_a_sharded_model_can_be_copied():
    """As PEFT copies modules that it saves; the copy does not hold the rest of the model."""
    sharding = shard_on_nodes(BOTH)
    evaluate(sharding), evaluate(sharding)  # ranks have compared what was written
    copied = copy.deepcopy(sharding.model.blocks[0].norm)
    assert torch.equal(copied.weight.full_tensor(), torch.ones(12))
