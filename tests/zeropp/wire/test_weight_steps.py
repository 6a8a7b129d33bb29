"""Weights that cross nodes as steps of their codes: equal copies, bytes, and what they catch up."""

import logging.handlers
import os
import random

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import (
    BOTH,
    HPZ,
    QWZ,
    evaluate,
    load_random_weights,
    restore_codes,
    shard_on_nodes,
    step,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import InputError, Sharding, ZeroConfig, fsdp_adapter, shard
from zeropp.checkpoint.kept_codes import codes_to_save
from zeropp.quant.ops import dequantize
from zeropp.quant.packing import RAW
from zeropp.wire.collectives import weight_layout
from zeropp.wire.weight_steps import CHECK_BYTES

ALL = BOTH | {"zero_quantized_gradients": True}
CALLS = (*3 * ("step",), "accumulate", "skip", "evaluate", "load", "changed", "freeze", "fail")
CALLS += ("save", "go back", "resume")
PRECISIONS = ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})
# Of random calls; 2 in the suite, more where RANDOM_SEQUENCES is set.
SEQUENCES = max(2, int(os.environ.get("RANDOM_SEQUENCES", "0")) // 20)


def shard_with_steps(
    levels: int | None = 5, steps: dict | None = None, **settings: object
) -> Sharding:
    zeropp = {"weight_steps": True, "weight_step_levels": levels, **(steps or {})}
    return shard_on_nodes(ALL, zeropp=zeropp, **settings)


def adamw(sharding: Sharding, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(sharding.model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def rows_of(sharding: Sharding) -> list[torch.Tensor | None]:
    """The copies of all units, up to date or not; ranks of one place in their nodes share them."""
    copies = sharding.roots[0].copies
    both = ((copies.get(unit), copies.get_outdated(unit)) for unit in sharding.units)
    return [current if outdated is None else outdated for current, outdated in both]


def let_codes_catch_up(sharding: Sharding) -> None:
    """Pass forward after updates that change nothing until no rank's messages move a code.

    They are at most 70: 128 / 2 messages of 5 levels, and more.
    """
    sharding.model.zero_grad()
    resting = adamw(sharding, lr=0.0)
    for _ in range(70):
        resting.step()
        evaluate(sharding)
        counts = sharding.last_weight_steps()
        left = torch.tensor(counts.moved + counts.capped + counts.rescaled)
        dist.all_reduce(left)
        if not left:
            return


def require_equal_copies(sharding: Sharding) -> None:
    members = sharding.plan.units[-1].axis.weights.outer_hop(dist.get_rank()).members
    for rows in rows_of(sharding):
        if rows is not None:
            everywhere = [torch.empty_like(rows) for _ in range(4)]
            dist.all_gather(everywhere, rows)
            assert all(torch.equal(rows, everywhere[member]) for member in members)


def require_close_to_the_weights(sharding: Sharding) -> None:
    """Every number of a copy is the one that is nearest to the weight by its scale."""
    for unit, rows in zip(sharding.units, rows_of(sharding), strict=True):
        layout = weight_layout(
            fsdp_adapter.own_specs(unit),
            sharding.plan.units[-1].axis.weights,
            sharding.compute_dtype,
        )
        own = rows[fsdp_adapter.collectives_of(unit).all_gather.outer.place][None]
        numbers = torch.empty((1, layout.elements))
        dequantize(own, numbers, layout)
        shards = [each.local.detach().flatten() for each in fsdp_adapter.own_shards(unit)]
        for segment, weight in zip(layout.segments, [s for s in shards if len(s)], strict=True):
            part = numbers[0, segment.start : segment.start + len(weight)]
            if segment.bits == RAW:
                assert torch.equal(part, weight.to(sharding.compute_dtype).float())
                continue
            blocks = -(-segment.size // 256)
            scales = own[0, segment.scales_at : segment.scales_at + 2 * blocks]
            scales = scales.view(torch.bfloat16).float().abs().repeat_interleave(256)
            rounded, scales = weight.to(sharding.compute_dtype).float(), scales[: len(weight)]
            allowed = torch.where(part.abs() >= 127 * scales, 2.0, 0.5001)  # in docs/numerics.md
            assert ((part - rounded).abs() <= allowed * scales).all()


@ranks(4)
def test_copies_take_the_memory_of_copies_without_steps():
    """The model's codes and scales, over the ranks of a node."""
    held = []
    for sharding in (shard_on_nodes(ALL), shard_with_steps()):
        step(sharding, adamw(sharding), 0)
        step(sharding, adamw(sharding), 1)
        evaluate(sharding)
        held.append(sharding.roots[0].copies.nbytes)
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("levels", [3, 5, 9])
@ranks(4)
def test_bytes_are_those_foretold(levels):
    sharding = shard_with_steps(levels)
    optimizer = adamw(sharding)
    step(sharding, optimizer, 0)
    whole = sharding.traffic.take()["weights_forward", "across_nodes"]
    for number, micro_batches in enumerate((1, 3)):
        step(sharding, optimizer, number, micro_batches=micro_batches)
        sent = sharding.traffic.take()
        assert sent == sharding.expected_traffic(micro_batches)
        assert sent["weights_forward", "across_nodes"] < whole


@ranks(4, timeout=180)
def test_copies_stay_equal_and_catch_up():
    sharding = shard_with_steps()
    optimizer = adamw(sharding)
    for number in range(11):
        step(sharding, optimizer, number)
        if number % 5 == 0:
            evaluate(sharding)
            require_equal_copies(sharding)
    let_codes_catch_up(sharding)
    require_equal_copies(sharding)
    require_close_to_the_weights(sharding)
    counts = sharding.last_weight_steps()
    assert counts.codes > 0 and counts.moved == counts.capped == counts.rescaled == 0


@ranks(4)
def test_losses_stay_close_to_those_of_whole_codes():
    results = []
    for sharding in (shard_on_nodes(ALL), shard_with_steps(None)):
        optimizer = adamw(sharding, lr=2e-3)
        losses = [step(sharding, optimizer, number)[0] for number in range(12)]
        mean = torch.tensor(sum(losses[-6:]) / 6)
        dist.all_reduce(mean)
        results.append(mean.item() / 4)
    assert results[1] == pytest.approx(results[0], rel=0.02)


@ranks(4)
def test_evaluations_change_no_training():
    runs = []
    for evaluations in (0, 2):
        sharding = shard_with_steps(None)
        optimizer = adamw(sharding)
        losses = []
        for number in range(4):
            losses += step(sharding, optimizer, number, micro_batches=2)
            for _ in range(evaluations):
                evaluate(sharding)
        runs.append(losses)
    assert runs[0] == runs[1]


@ranks(4)
def test_levels_follow_what_is_needed():
    sharding = shard_with_steps(None)
    steps = sharding.roots[0].copies.steps
    fast, slow = adamw(sharding, lr=0.03), adamw(sharding, lr=1e-6)
    for number in range(3):
        step(sharding, fast, number)
    assert 4 in {steps.reach_of(unit) for unit in sharding.units}
    for number in range(12):  # of 3 / 2**7 of a block's largest weight, 4 / 127 with each message
        step(sharding, slow, number)
    assert {steps.reach_of(unit) for unit in sharding.units} == {1}


@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(4, timeout=180)
def test_random_calls_leave_equal_copies(seed):
    generator = random.Random(seed)
    sharding = shard_with_steps(generator.choice([None, 3, 5, 9]), **generator.choice(PRECISIONS))
    optimizers = [adamw(sharding), adamw(sharding, 1e-2)]
    blocks, saved = list(sharding.model.blocks), {}
    for number in range(40):
        call = generator.choice(CALLS)
        optimizer = generator.choice(optimizers)
        if call == "step":
            step(sharding, optimizer, number)
        elif call == "accumulate":
            step(sharding, optimizer, number, micro_batches=generator.choice([2, 3]))
        elif call == "skip":  # as after an overflow in fp16
            loss_of(sharding.model, tokens_of(number)).backward()
            optimizer.zero_grad()
        elif call == "save":
            saved = saved_state(sharding)
        elif call == "go back" and saved:
            go_back(sharding, saved)
        elif call == "resume":
            sharding = resumed(sharding, generator)
            optimizers = [adamw(sharding), adamw(sharding, 1e-2)]
            blocks, saved = list(sharding.model.blocks), {}
        elif call == "evaluate":
            evaluate(sharding)
        elif call == "load":
            load_random_weights(sharding, number)
        elif call == "changed":
            with torch.no_grad():
                for weight in sharding.model.parameters():
                    weight.to_local().mul_(0.9)
            sharding.weights_changed()
        elif call == "freeze":
            frozen = generator.random() < 0.5
            for parameter in generator.choice(blocks).parameters():
                parameter.requires_grad_(not frozen)
        elif torch.__version__ >= "2.13":
            fail_in_the_middle(sharding, generator)
        require_equal_copies(sharding)
    let_codes_catch_up(sharding)
    require_close_to_the_weights(sharding)


def saved_state(sharding: Sharding) -> dict[str, torch.Tensor]:
    """This rank's shards and codes, as a checkpoint would hold them."""
    shards = {name: weight.to_local() for name, weight in sharding.model.named_parameters()}
    tensors = shards | codes_to_save(sharding.model)
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def go_back(sharding: Sharding, saved: dict[str, torch.Tensor]) -> None:
    """Load what `saved_state` returned."""
    with torch.no_grad():
        for name, weight in sharding.model.named_parameters():
            weight.to_local().copy_(saved[name])
    sharding.weights_changed()
    restore_codes(sharding.model, saved)


def resumed(sharding: Sharding, generator: random.Random) -> Sharding:
    """Go on with another model from what a checkpoint holds: on other nodes, in another type.

    In the same type the codes are those that were saved, in another they are new.
    """
    loss, saved = evaluate(sharding), saved_state(sharding)
    zero, per_node = generator.choice([(ALL, 2), (ALL | {"zero_hpz_partition_size": 16}, 1)])
    steps = {"weight_steps": True, "weight_step_levels": generator.choice([None, None, 3, 5, 9])}
    config = zero_config(zero, per_node, zeropp=steps, **generator.choice(PRECISIONS))
    other = shard(small_model(), data_mesh(), config)
    for mine, weight in zip(other.model.parameters(), sharding.model.parameters(), strict=True):
        mine.requires_grad_(weight.requires_grad)
    go_back(other, saved)
    if other.compute_dtype == sharding.compute_dtype:
        assert evaluate(other) == loss
    else:
        evaluate(other)
        require_close_to_the_weights(other)
    return other


def fail_in_the_middle(sharding: Sharding, generator: random.Random) -> None:
    """A forward pass that raises, on each rank after another block."""
    depth = generator.randrange(2)
    block = sharding.model.blocks[(depth + dist.get_rank()) % len(sharding.model.blocks)]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = block.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        evaluate(sharding)
    handle.remove()
    sharding.model.train()
    sharding.release()


@ranks(4)
def test_copies_that_differ_are_found_and_sent_again():
    """The second node's copy of a unit is changed; it is noticed after the third message."""
    sharding = shard_with_steps(steps={"weight_step_check_interval": 3})
    optimizer = adamw(sharding)
    for number in range(3):
        step(sharding, optimizer, number)
    unit = sharding.units[0]
    if dist.get_rank() == 2:
        rows_of(sharding)[0][1, 100] += 1
    warnings = logging.handlers.BufferingHandler(capacity=100)
    warnings.setLevel(logging.WARNING)
    logging.getLogger("zeropp").addHandler(warnings)
    step(sharding, optimizer, 3)  # the third message: the first gather sent whole codes
    messages = [record.getMessage() for record in warnings.buffer]
    warnings.flush()
    text = f"the nodes' copies of {fsdp_adapter.name_of(unit)} differ; whole codes are sent again"
    assert messages == ([text] if dist.get_rank() % 2 == 0 else [])  # those that share the row
    require_equal_copies(sharding)
    sharding.traffic.take()
    for number in range(4, 7):
        step(sharding, optimizer, number)
    assert not warnings.buffer
    logging.getLogger("zeropp").removeHandler(warnings)
    sent, expected = sharding.traffic.take(), sharding.expected_traffic(1)
    key = "weights_forward", "across_nodes"
    # Of the three steps, the last one compares.
    compared = CHECK_BYTES * len(sharding.units)
    assert sent[key] == 3 * expected[key] + compared
    interval = shard_with_steps().roots[0].copies.steps.check_interval
    assert 0 < compared / interval < 1e-3 * expected[key]


@ranks(2)
def test_one_node_keeps_no_copy_and_sends_no_steps():
    sharding = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
    assert sharding.roots[0].copies is None


@pytest.mark.parametrize(
    ("zero", "settings", "message"),
    [
        (HPZ, {}, "weight_steps = true and zero_optimization.zero_quantized_weights = false: the"),
        (QWZ, {}, "zero_hpz_partition_size = 1: a node takes steps from the codes that it keeps"),
        (BOTH, {"weight_bits": 4}, "zeropp.weight_bits = 4: the steps are those of INT8 codes"),
        (BOTH, {"weight_step_levels": 4}, "weight_step_levels = 4: expected one of 3, 5, 9"),
    ],
)
def test_bad_settings_are_named(zero, settings, message):
    with pytest.raises(InputError, match=message):
        ZeroConfig.from_json(
            {"zero_optimization": zero, "zeropp": {"weight_steps": True} | settings}
        )
