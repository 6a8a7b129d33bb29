"""Frozen weights stored quantized: values, memory, traffic, and that nothing trains them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.ranks import ranks
from tests.zeropp.lora_model import (
    add_adapters,
    expected_losses,
    lora_model,
    with_quantized_weights,
)
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import random_like
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, optimizer_step, shard
from zeropp.capabilities.mixz.storage import FrozenShard
from zeropp.checkpoint import state_tensors as named
from zeropp.optim.step_or_skip import local_part
from zeropp.quant.packing import BLOCK
from zeropp.sharding.shard import allocate_parameters, part_for_rank
from zeropp.wire.quantized_shard import is_quantized, stored_bytes

MIXZ = {"stage": 3, "zero_quantized_nontrainable_weights": True}
HPZ = {"zero_hpz_partition_size": 2}
STEPS = 2


def losses_of(sharding, steps: int = STEPS, micro_batches: int = 2) -> list[float]:
    """The mean over ranks of each step's losses."""
    trained = [parameter for parameter in sharding.model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2, fused=True), []
    for step in range(steps):
        mine = tokens_of(step).chunk(sharding.num_ranks)[dist.get_rank()].chunk(micro_batches)
        total = torch.zeros(())
        for index, tokens in enumerate(mine):
            with sharding.micro_step(last=index == micro_batches - 1):
                loss = loss_of(sharding.model, tokens) / micro_batches
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / sharding.num_ranks)
        optimizer_step(optimizer, sharding)
    return losses


@pytest.mark.parametrize("shape", [(5, 12), (0, 12), (1, 300), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_shard_reads_as_numbers_near_its_values(shape, dtype, bits):
    values = torch.randn(shape).to(dtype)
    stored = FrozenShard.of(values, 600, bits)
    largest = values.abs().amax().item() if values.numel() else 0.0
    assert stored.shape == values.shape and stored.dtype == dtype
    error = (stored + 0 - values).abs()  # any op reads numbers
    # One step at most, two where the scale was cut off (docs/numerics.md), and dtype's rounding.
    assert not error.numel() or error.max() <= largest * (2 / 2 ** (bits - 1) + 2**-8)
    assert torch.equal(FrozenShard.of(stored.float(), 600, bits).packed, stored.packed) or (
        dtype != torch.float32  # whose products of code and scale are exact
    )
    assert stored.packed.nbytes <= (600 * bits // 8) * (1 + 2 * 8 / (bits * BLOCK[bits])) + 3 * 16


def test_only_whole_copies_may_be_written():
    stored = FrozenShard.of(torch.zeros(4, 64), 256, 8)
    stored.copy_(torch.full((4, 64), 2.0))
    assert torch.allclose(stored + 0, torch.full((4, 64), 2.0), rtol=2**-7)
    for write in (stored.zero_, lambda: torch._foreach_add_([stored], 1.0)):
        with pytest.raises(InputError, match="is stored quantized"):
            write()
    copy = stored.detach().clone()
    assert isinstance(copy, FrozenShard) and torch.equal(copy.packed, stored.packed)


@pytest.mark.parametrize(
    ("more", "settings", "close"),
    [
        ({"stage": 1}, {}, 1e-5),
        ({"stage": 2}, {}, 1e-5),
        ({"zero_quantized_weights": True}, {}, 1e-3),  # which rounds the adapters on their way
        (HPZ, {}, 1e-5),
        (HPZ, {"bf16": {"enabled": True}}, 1e-2),  # of a loss, in 8 or 11 bits of mantissa
        ({}, {"fp16": {"enabled": True}}, 1e-2),
    ],
)
@ranks(4, ranks_per_node=2)
def test_training_is_that_of_the_rounded_weights(more, settings, close):
    sharding = shard(lora_model(), data_mesh(), zero_config(MIXZ | more, 2, **settings))
    expected = expected_losses(with_quantized_weights(lora_model(), 4), STEPS, 2, 4)
    assert losses_of(sharding) == pytest.approx(expected, rel=close)


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@ranks(1)
def test_one_rank_stores_them_quantized_too(settings):
    sharding = shard(lora_model(), data_mesh(), zero_config(MIXZ, **settings))
    frozen = [p for p in sharding.model.parameters() if not p.requires_grad and p.ndim >= 2]
    assert frozen and all(map(is_quantized, frozen))
    expected = expected_losses(with_quantized_weights(lora_model(), 1), STEPS, 2, 1)
    assert losses_of(sharding) == pytest.approx(expected, rel=1e-2 if settings else 1e-5)


@ranks(2)
def test_memory_falls_to_a_byte_and_a_scale():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    model.requires_grad_(False)
    model.append(nn.Linear(512, 4))
    sharding = shard(model, data_mesh(), zero_config(MIXZ, bf16={"enabled": True}))
    num_bytes, elements = stored_bytes(sharding.model)
    assert elements == 4 * 512 * 512 // 2
    assert num_bytes == elements * (1 + 2 / BLOCK[8])  # 0.504 of bf16


@pytest.mark.parametrize("settings", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@ranks(3)
def test_loaded_weights_are_quantized(settings):
    config, whole = zero_config(MIXZ, **settings), lora_model()
    expected = losses_of(shard(lora_model(), data_mesh(), config), micro_batches=1)
    with torch.device("meta"):
        model = lora_model()
    sharding = allocate_parameters(shard(model, data_mesh(), config), config, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        assert not parameter.is_meta and is_quantized(parameter) == (
            not parameter.requires_grad and parameter.ndim >= 2
        )
    with torch.no_grad():
        for name, values in whole.named_parameters():
            local_part(parameters[name]).copy_(part_for_rank(values, parameters[name]))
    sharding.weights_changed()
    assert losses_of(sharding, micro_batches=1) == expected


@ranks(2)
def test_a_model_built_under_init_is_stored_quantized():
    expected = losses_of(shard(lora_model(), data_mesh(), zero_config(MIXZ)))
    with zeropp.zero.Init():
        model = lora_model()
    sharding = shard(model, data_mesh(), zero_config(MIXZ))
    assert sharding.plan.has_codes and stored_bytes(sharding.model)[1]
    assert losses_of(sharding) == expected


@pytest.mark.parametrize(
    "zero", [MIXZ, MIXZ | HPZ, {"stage": 3} | HPZ], ids=["flat", "hpZ", "hpZ, numbers"]
)
@ranks(4, ranks_per_node=2)
def test_frozen_weights_cross_nodes_once_in_a_run_with_hpz(zero):
    sharding = shard(lora_model(), data_mesh(), zero_config(zero, 2))
    crossed = []
    for _ in range(3):
        sharding.traffic.take()
        losses_of(sharding, steps=1)
        crossed.append(crossing(sharding))
    if not HPZ.keys() & zero.keys():
        assert crossed[0] == crossed[1] == crossed[2] > 0
        return
    trained = [spec for unit in sharding.plan.units for spec in unit.specs if spec.trainable]
    adapters = 4 * 4 * sum(spec.elements for spec in trained)  # fp32, of 4 ranks
    padding = 4 * 16 * len(sharding.model.blocks)  # of each rank's messages to 16 bytes
    assert adapters <= crossed[1] == crossed[2] <= adapters + padding
    assert crossed[2] < crossed[0]
    with torch.no_grad():
        loss_of(sharding.model, tokens_of(0))  # the adapters changed in the last step
    assert crossing(sharding) <= crossed[2]
    with torch.no_grad():
        for step in range(3):
            loss_of(sharding.model, tokens_of(step))
    assert crossing(sharding) == 0


@ranks(4, ranks_per_node=2)
def test_codes_written_in_place_without_notice_are_seen():
    losses = []
    for notifies in (True, False):
        sharding = shard(lora_model(), data_mesh(), zero_config(MIXZ | HPZ, 2))
        weight = sharding.model.blocks[0].up.base.weight
        for seed in range(3):
            with torch.no_grad():
                weight.copy_(random_like(weight, seed))
                if notifies:
                    sharding.weights_changed()
                losses.append(loss_of(sharding.model, tokens_of(1)).item())
    assert losses[:3] == losses[3:] and len({*losses}) == 3


def crossing(sharding) -> int:
    """Bytes of weights that crossed nodes since this was last asked, of all ranks."""
    sent = sharding.traffic.take()
    purposes = ("weights_forward", "weights_backward")
    total = torch.tensor([sent[purpose, "across_nodes"] for purpose in purposes])
    dist.all_reduce(total)
    return int(total.sum())


@ranks(4, ranks_per_node=2)
def test_the_forecast_matches_what_is_sent():
    quantized = {"zero_quantized_weights": True}
    for zero in (MIXZ, MIXZ | HPZ, MIXZ | quantized, {"stage": 3} | HPZ | quantized):
        sharding = shard(lora_model(), data_mesh(), zero_config(zero, 2))
        losses_of(sharding, steps=1)
        sharding.traffic.take()
        losses_of(sharding, steps=1)
        sent = {key: value for key, value in sharding.traffic.take().items() if value}
        foretold = {key: value for key, value in sharding.expected_traffic(2).items() if value}
        assert sent == foretold
    unquantized = shard(lora_model(), data_mesh(), zero_config({"stage": 3}, 2))
    assert sharding.plain_traffic(2) == unquantized.plain_traffic(2)


@ranks(2)
def test_a_stored_weight_that_is_made_trainable_is_named():
    sharding = shard(lora_model(), data_mesh(), zero_config(MIXZ))
    sharding.model.blocks[1].up.base.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"blocks\.1\.up\.base\.weight requires gradients"):
        losses_of(sharding)


@ranks(2)
def test_whole_weights_can_be_read_and_written():
    sharding = shard(lora_model(), data_mesh(), zero_config(MIXZ))
    weight = sharding.model.blocks[0].up.base.weight
    whole = weight.full_tensor()
    assert torch.allclose(whole, lora_model().blocks[0].up.base.weight, atol=4e-3)
    with zeropp.zero.GatheredParameters(weight, modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.fill_(0.5)
    assert torch.allclose(weight.full_tensor(), torch.full_like(whole, 0.5), rtol=2**-7)
    assert is_quantized(weight)


@ranks(2)
def test_a_checkpoint_holds_what_is_trained(tmp_path):
    """Frozen weights that are stored quantized are where they came from."""
    config = {
        "train_batch_size": 4, "zero_optimization": MIXZ, "optimizer": {"type": "AdamW"},
    }  # fmt: skip
    engine, *_ = zeropp.initialize(model=lora_model(), config=config)
    first = loss_of(engine, tokens_of(0))
    engine.backward(first)
    engine.step()
    engine.save_checkpoint(tmp_path)
    expected = loss_of(engine, tokens_of(1)).item()
    again, *_ = zeropp.initialize(model=lora_model(), config=config)
    again.load_checkpoint(tmp_path)
    assert loss_of(again, tokens_of(1)).item() == expected
    saved = named.model_tensors(again.module)
    assert not any("base.weight" in name for name in saved) and len(saved) > 12


@ranks(1)
def test_a_model_without_frozen_weights_is_an_error():
    config = {"train_batch_size": 8, "zero_optimization": MIXZ}
    config["optimizer"] = {"type": "AdamW"}
    engine, *_ = zeropp.initialize(model=small_model(), config=config)
    with pytest.raises(InputError, match="all weights are trained"):
        engine.optimizer.quantize_nontrainable_params()


@ranks(1)
def test_the_call_needs_its_key_and_a_model_that_has_not_run():
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}
    engine, *_ = zeropp.initialize(
        model=small_model(), config=config | {"zero_optimization": {"stage": 3}}
    )
    with pytest.raises(InputError, match="needs zero_optimization.zero_quantized_nontrainable"):
        engine.quantize_nontrainable_params()
    engine, *_ = zeropp.initialize(model=small_model(), config=config | {"zero_optimization": MIXZ})
    loss_of(engine, tokens_of(0))
    add_adapters(engine.module)
    with pytest.raises(InputError, match="before the first forward pass"):
        engine.quantize_nontrainable_params()
