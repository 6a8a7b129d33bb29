"""The gathered weights, on every rank, against quantizing each parameter by itself."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import BOTH, QWZ, shard_on_nodes
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Sharding, ZeroConfig, shard
from zeropp.quant.ops import dequantize, quantize
from zeropp.quant.packing import RowLayout

SHAPES = {
    "large": (130, 67), "gain": (300,), "small": (41, 9), "one row": (1, 700), "one": (1, 1),
    "image": (5, 3, 3, 3), "fewer rows than ranks": (3, 50), "bias": (7,),
}  # fmt: skip
SIZES = {"large": 10.0, "small": 1e-4, "image": 1e3}  # neighbours differ, so blocks must not mix


class Odd(nn.Module):
    """A unit of parameters of any shape; "small" and "bias" are frozen from the start."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList()
        for name, shape in SHAPES.items():
            values = SIZES.get(name, 1.0) * torch.randn(shape, generator=generator)
            frozen = name in ("small", "bias")
            self.weights.append(nn.Parameter(values, requires_grad=not frozen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(weight.float().sum() for weight in self.weights)


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Odd(), Odd()])

    def forward(self) -> torch.Tensor:
        x = torch.zeros(())
        for block in self.blocks:
            x = block(x)
        return x


def quantized_alone(whole: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """What each rank's rows of one parameter are after quantization, put together again."""
    parts = []
    for rows in whole.to(dtype).chunk(dist.get_world_size()):
        layout = RowLayout(sizes=(rows.numel(),), bits=(bits,), wire=dtype)
        out = torch.empty(1, rows.numel(), dtype=dtype)
        dequantize(quantize(rows.reshape(1, -1).clone(), layout), out, layout)
        parts.append(out.view(rows.shape))
    return torch.cat(parts)


def computed_with(sharding: Sharding, *, passes: int = 1) -> list[list[torch.Tensor]]:
    """The whole weights of each use of a block, forward and backward alike."""
    weights = []
    for block in sharding.model.blocks:
        block.register_forward_pre_hook(
            lambda block, _: weights.append([weight.detach().clone() for weight in block.weights])
        )
    for _ in range(passes):
        with sharding.micro_step(last=True):
            sharding.model().backward()
    return weights


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({}, 8),
        ({"fp16": {"enabled": True}}, 8),
        ({"bf16": {"enabled": True}}, 8),
        ({"bf16": {"enabled": True}}, 4),
    ],
)
@ranks(4)
def test_every_rank_computes_with_the_same_quantized_weights(settings, bits):
    """D4: blocks never cross a parameter, fewer than two dims travel as they are, any shape.

    FSDP2: the own shard is dequantized too; the quantizer does not write its input.
    """
    for ranks_per_node, zero in ((2, QWZ), (2, BOTH), (1, QWZ), (4, QWZ), (4, QWZ | {"stage": 1})):
        config = zero_config(zero, ranks_per_node, zeropp={"weight_bits": bits}, **settings)
        sharding = shard_odds(config)
        dtype = getattr(torch, config.compute_format)
        for weights in computed_with(sharding, passes=2 if zero == BOTH else 1):
            for weight, whole in zip(weights, Odd().weights, strict=True):
                expected = whole.to(dtype)
                if whole.dim() >= 2:
                    expected = quantized_alone(whole.detach(), bits, dtype)
                    finer = whole.numel() == 1 or not torch.equal(expected, whole.to(dtype))
                    assert finer, "nothing was quantized"
                assert torch.equal(weight, expected), (whole.shape, zero, ranks_per_node)
        for rows, whole in zip(sharding.model.parameters(), Odds().parameters(), strict=True):
            assert torch.equal(rows.full_tensor(), whole)


def shard_odds(config: ZeroConfig) -> Sharding:
    return shard(Odds(), data_mesh(), config)


@ranks(4)
def test_without_quantization_weights_arrive_as_they_are():
    for zero in ({"stage": 3}, {"stage": 3, "zero_hpz_partition_size": 2}):
        for weights in computed_with(shard_odds(zero_config(zero, 2)), passes=2):
            for weight, whole in zip(weights, Odd().weights, strict=True):
                assert torch.equal(weight, whole)


@ranks(4)
def test_weights_frozen_before_sharding_keep_their_values():
    """DeepSpeed 0.19.8: they become all zeros there."""
    model = small_model()
    model.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    sharding = shard_on_nodes(BOTH, model)
    expected = loss_of(small_model(), tokens_of(0)).item()
    for _ in range(2):
        assert loss_of(sharding.model, tokens_of(0)).item() == pytest.approx(expected, rel=0.01)
    sharding.release()
    for name, weight in model.named_parameters():
        assert torch.equal(weight.full_tensor(), before[name])


@ranks(4)
def test_frozen_weights_of_another_type_in_a_unit():
    """FSDP2: mixed types in a group turn the buffer into bytes, unless all are cast alike."""

    def losses(zero: dict, **settings: object) -> list[float]:
        model = small_model()
        model.blocks[0].up.bfloat16().requires_grad_(False)
        model.blocks[1].norm.double().requires_grad_(False)
        shard_on_nodes(zero, model, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        values = []
        for number in range(2):
            loss = loss_of(model, tokens_of(number).chunk(4)[dist.get_rank()])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        return values

    for settings in ({}, {"bf16": {"enabled": True}}):
        exact = losses({"stage": 3}, **settings)
        quantized = losses(QWZ, **settings)
        assert losses(BOTH, **settings) == quantized != exact
        assert quantized == pytest.approx(exact, rel=0.02)
