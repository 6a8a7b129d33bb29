"""Activation checkpointing and compilation, in each way a model may use them, change nothing."""

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
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharded_training import evaluate, shard_on_nodes, step
from tests.zeropp.small_model import SmallModel, small_model


class Outside(SmallModel):
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


def checkpoint_inside_blocks(reentrant: bool) -> SmallModel:
    """Recompute the forward pass of each block inside of its unit."""
    model = small_model()
    for block in model.blocks:
        block.wrapped = block.forward
        block.forward = lambda x, block=block: checkpoint(block.wrapped, x, use_reentrant=reentrant)
    return model


def checkpoint_around_blocks(reentrant: bool) -> SmallModel:
    torch.manual_seed(5)
    model = Outside(2)
    model.reentrant = reentrant
    return model


def checkpoint_by_wrapper(reentrant: bool) -> SmallModel:
    """Recompute each block with PyTorch's own wrapper."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    model = small_model()
    model.blocks = nn.ModuleList([checkpoint_wrapper(block, kind) for block in model.blocks])
    return model


def compile_blocks(_: bool) -> SmallModel:
    model = small_model()
    model.blocks = nn.ModuleList(
        [torch.compile(block, backend="eager", fullgraph=True) for block in model.blocks]
    )
    return model


def compile_in_place(_: bool) -> SmallModel:
    model = small_model()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


WAYS = {
    "inside": checkpoint_inside_blocks,
    "outside": checkpoint_around_blocks,
    "wrapper": checkpoint_by_wrapper,
}
COMPILED = {"wrapped": compile_blocks, "in place": compile_in_place}


def train_and_evaluate(model: SmallModel, zero: dict) -> tuple[list[float], dict[str, int]]:
    """Losses and norms of this rank's gradients of two steps, and bytes by hop and pass."""
    sharding = shard_on_nodes(zero, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: losses.extend(norms(model)))
    for number in range(2):
        losses += step(sharding, optimizer, number, micro_batches=2)
        losses.append(evaluate(sharding))
    return losses, sharding.traffic.sent


def norms(model: nn.Module) -> list[float]:
    return [weight.grad.to_local().double().norm().item() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("zero", "ways"),
    [
        (ALL_THREE, list(product(WAYS, (False, True)))),
        ({"stage": 3}, [("outside", True)]),
        ({"stage": 2, "zero_quantized_gradients": True}, [("inside", True), ("outside", False)]),
        (ALL_THREE, [("wrapped", False)]),
        ({"stage": 2, "zero_quantized_gradients": True}, [("in place", False)]),
    ],
)
@ranks(4, timeout=180)
def test_recomputation_and_compilation_change_no_bit_and_no_byte(zero, ways):
    """DeepSpeed issues #4784; FSDP2: the wrapping goes inside `fully_shard`."""
    expected, sent = train_and_evaluate(small_model(), zero)
    for way, reentrant in ways:
        values, sent_again = train_and_evaluate((WAYS | COMPILED)[way](reentrant), zero)
        assert values == expected, (way, reentrant)
        if zero.get("zero_hpz_partition_size"):
            across = [key for key in sent if key[1] == "across_nodes"]
            assert [sent_again[key] for key in across] == [sent[key] for key in across]
            assert sent_again["weights_backward", "across_nodes"] == 0
        if not (way == "outside" and reentrant):  # which gathers for a forward pass in backward
            assert sent_again == sent, (way, reentrant)
