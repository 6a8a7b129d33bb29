"""Activation checkpointing, in each of the ways a model may do it, changes no bit and no byte."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.ranks import ranks
from tests.zeropp.given import ALL_THREE
from tests.zeropp.stack import Stack, fresh_stack
from tests.zeropp.stepping import evaluate, sharded, step


class Outside(Stack):
    """The whole call of a block is done again in backward: its gather too, as Hugging Face does."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            else:
                x = block(x)
        return nn.functional.linear(x, self.embedding.weight)


def inside(reentrant: bool) -> Stack:
    """What is done again lies inside the unit."""
    model = fresh_stack()
    for block in model.blocks:
        block.wrapped = block.forward
        block.forward = lambda x, block=block: checkpoint(
            block.wrapped, x, use_reentrant=reentrant
        )
    return model


def outside(reentrant: bool) -> Stack:
    torch.manual_seed(5)
    model = Outside()
    model.reentrant = reentrant
    return model


def wrapped(reentrant: bool) -> Stack:
    """As PyTorch's own wrapper does it."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    model = fresh_stack()
    model.blocks = nn.ModuleList([checkpoint_wrapper(one, kind) for one in model.blocks])
    return model


WAYS = {"inside": inside, "outside": outside, "wrapper": wrapped}


def story(model: Stack, zero: dict) -> tuple[list[float], dict[str, int]]:
    """Losses, gradients' norms and weights of two steps, and bytes by hop and pass."""
    sharding = sharded(zero, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: found.extend(norms(model)))
    for number in range(2):
        found += step(sharding, optimizer, number, micro_batches=2)
        found.append(evaluate(sharding))
    return found, sharding.traffic.sent


def norms(model: nn.Module) -> list[float]:
    return [one.grad.full_tensor().double().norm().item() for one in model.parameters()]


@pytest.mark.parametrize(
    "zero", [ALL_THREE, {"stage": 3}, {"stage": 2, "zero_quantized_gradients": True}]
)
@ranks(4)
def test_recomputation_changes_no_bit_and_no_byte(zero):
    """DeepSpeed issues #4784; FSDP2: the wrapping goes inside `fully_shard`."""
    expected, sent = story(fresh_stack(), zero)
    for way, reentrant in product(WAYS, (False, True)):
        values, sent_again = story(WAYS[way](reentrant), zero)
        assert values == expected, (way, reentrant)
        if zero.get("zero_hpz_partition_size"):
            across = [key for key in sent if key[1] == "across_nodes"]
            assert [sent_again[key] for key in across] == [sent[key] for key in across]
            assert sent_again["weights_backward", "across_nodes"] == 0
        if not (way == "outside" and reentrant):  # which gathers for a forward pass in backward
            assert sent_again == sent, (way, reentrant)
