"""Copies that steps bring up to date: equal on all nodes, near the weights, and few bytes."""

import logging
import os
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import logged
from tests.zeropp.prescribed_gradients import data_mesh, zero_config
from tests.zeropp.sharded_training import (
    ALL,
    BOTH,
    evaluate,
    load_random_weights,
    restore_codes,
    shard_on_nodes,
    step,
    two_machines,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Sharding, fsdp_adapter, shard
from zeropp.checkpoint.kept_codes import codes_to_save
from zeropp.quant.ops import dequantize
from zeropp.quant.packing import RAW
from zeropp.wire.collectives import weight_layout
from zeropp.wire.rank_group import RankGroup

CALLS = (*3 * ("step",), "accumulate", "skip", "evaluate", "load", "write", "freeze", "fail")
CALLS += ("save", "go back", "resume")
CODED = ("auto", "auto", True, False)
PRECISIONS = ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})
# Of random calls; 2 in the suite, more where RANDOM_SEQUENCES is set.
SEQUENCES = max(2, int(os.environ.get("RANDOM_SEQUENCES", "0")) // 20)


def shard_with_steps(coded: object = True, steps: dict | None = None, **settings) -> Sharding:
    zeropp = {"weight_steps": True, "code_messages": coded, **(steps or {})}
    return shard_on_nodes(ALL, zeropp=zeropp, **settings)


def adamw(sharding: Sharding, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(sharding.model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def rows_of(sharding: Sharding) -> list[torch.Tensor | None]:
    """The copies of all units, up to date or not; ranks of one place in their nodes share them."""
    kept = sharding.roots[0].kept
    both = ((kept.copy_of(unit), kept.get_outdated(unit)) for unit in sharding.units)
    return [current if outdated is None else outdated for current, outdated in both]


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
        own = rows[fsdp_adapter.collectives_of(unit).all_gather.outer.index][None]
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
        held.append(sharding.roots[0].kept.nbytes)
    assert held[0] == held[1] > 0


@ranks(4)
def test_bytes_are_those_foretold_and_coded_ones_fewer():
    """Coded messages take what is counted at most; the losses are the same to the last digit."""
    losses, rested = [], []
    for coded in (False, True):
        sharding = shard_with_steps(coded)
        optimizer = adamw(sharding)
        losses.append([step(sharding, optimizer, 0)])
        sharding.traffic.take()
        for number, micro_batches in enumerate((1, 3)):
            losses[-1].append(step(sharding, optimizer, number, micro_batches=micro_batches))
            sent, expected = sharding.traffic.take(), sharding.expected_traffic(micro_batches)
            if coded:
                across = [key for key in expected if key[1] == "across_nodes" and expected[key]]
                overhead = 100 * micro_batches * len(sharding.units)  # headers of messages
                assert all(sent[key] <= expected[key] + overhead for key in across)
                assert sent["weights_forward", "across_nodes"] < sum(
                    expected[key] for key in across if key[0] == "weights_forward"
                )
                assert all(sent[key] == expected[key] for key in expected if key not in across)
            else:
                assert sent == expected
        evaluate(sharding)
        adamw(sharding, lr=0.0).step()
        sharding.traffic.take()
        evaluate(sharding)
        rested.append(sharding.traffic.take()["weights_forward", "across_nodes"])
    assert losses[0] == losses[1]
    assert rested[1] < 0.5 * rested[0]  # where no code has changed: headers of messages


@ranks(4)
def test_lengths_are_sent_once_a_step_for_weights_and_while_others_compute_for_gradients():
    """And no digit changes. Without gloo they are the only messages of 64-bit integers."""
    losses, sent = [], []
    for is_counted in (False, True):
        with two_machines(without_gloo=is_counted), pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather", "all_to_all"):
                call = getattr(RankGroup, name)

                def counted(group, whole, part, *others, call=call, **keys):
                    if part.dtype == torch.int64:
                        sent.append((call.__name__, len(part), keys.get("async_op", False)))
                    return call(group, whole, part, *others, **keys)

                patch.setattr(RankGroup, name, counted)
            sharding = shard_with_steps()
            optimizer, units = adamw(sharding), len(sharding.units)
            losses.append([step(sharding, optimizer, number) for number in range(3)])
    assert losses[0] == losses[1]
    of_weights, of_gradients = ("all_gather", units, False), ("all_to_all", 2, True)
    assert sent == [*units * [of_gradients], *2 * [of_weights, *units * [of_gradients]]]


@ranks(4)
def test_losses_stay_close_to_those_of_whole_codes():
    results = []
    for sharding in (shard_on_nodes(ALL), shard_with_steps()):
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
        sharding = shard_with_steps()
        optimizer = adamw(sharding)
        losses = []
        for number in range(4):
            losses += step(sharding, optimizer, number, micro_batches=2)
            for _ in range(evaluations):
                evaluate(sharding)
        runs.append(losses)
    assert runs[0] == runs[1]


@ranks(4)
def test_weights_written_without_notice_are_sent_whole_as_after_a_notice():
    """Before an evaluation, and before a step."""

    def losses(*, is_told: bool) -> Iterator[float]:
        sharding = shard_with_steps()
        optimizer = adamw(sharding, 1e-2)
        for number in range(3):
            step(sharding, optimizer, number)
            loss_of(sharding.model, tokens_of(number)).backward()
            write_in_place(sharding, is_told=is_told)
            if number:
                optimizer.step()
            yield evaluate(sharding)

    assert [*losses(is_told=True)] == [*losses(is_told=False)]


@pytest.mark.parametrize("seed", range(SEQUENCES))
@ranks(4, timeout=180)
def test_random_calls_leave_equal_copies(seed):
    with two_machines(without_gloo=seed % 2 == 1):
        make_random_calls(random.Random(seed))


def make_random_calls(generator: random.Random) -> None:
    sharding = shard_with_steps(generator.choice(CODED), **generator.choice(PRECISIONS))
    optimizers = [adamw(sharding), adamw(sharding, 1e-1)]
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
        elif call in ("write", "evaluate"):
            if call == "write":
                write_in_place(sharding, is_told=generator.random() < 0.5)
            evaluate(sharding)
            require_close_to_the_weights(sharding)
        elif call == "load":
            load_random_weights(sharding, number)
        elif call == "freeze":
            frozen = generator.random() < 0.5
            for parameter in generator.choice(blocks).parameters():
                parameter.requires_grad_(not frozen)
        elif torch.__version__ >= "2.13":
            fail_in_the_middle(sharding, generator)
        require_equal_copies(sharding)
    evaluate(sharding)
    require_equal_copies(sharding)
    require_close_to_the_weights(sharding)


def write_in_place(sharding: Sharding, *, is_told: bool) -> None:
    with torch.no_grad():
        for weight in sharding.model.parameters():
            weight.to_local().mul_(0.9)
    if is_told:
        sharding.weights_changed()


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
    steps = {"weight_steps": True, "code_messages": generator.choice(CODED)}
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
    with logged(logging.WARNING) as messages:
        step(sharding, optimizer, 3)  # the third message: the first gather sent whole codes
    name = fsdp_adapter.name_of(unit)
    text = f"the copies of {name} differ between nodes: whole codes are sent again"
    assert messages == ([text] if dist.get_rank() % 2 == 0 else [])  # those that share the row
    require_equal_copies(sharding)
    with logged(logging.WARNING) as messages:
        for number in range(4, 7):
            step(sharding, optimizer, number)
    assert not messages


@ranks(2)
def test_one_node_keeps_no_copy_and_sends_no_steps():
    sharding = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
    assert not sharding.plan.axis.weights.keeps


@pytest.mark.parametrize(
    ("per_node", "bits"),
    [(1, (8, 3)), (2, (8, 3)), (2, (8, 4)), (1, (8, 8)), (2, (16, 4)), (1, (16, 16))],
)
@ranks(4, timeout=120)
def test_coded_gradients_are_those_that_are_not_to_the_last_bit(per_node, bits):
    """On two and on four nodes; three bits are spread, rows of other widths beside them."""
    gradients = []
    for coded in (False, True):
        zeropp = {"gradient_bits": list(bits), "code_messages": coded}
        zero = {"stage": 3, "zero_quantized_gradients": True}
        sharding = shard(small_model(), data_mesh(), zero_config(zero, per_node, zeropp=zeropp))
        loss_of(sharding.model, tokens_of(dist.get_rank())).backward()
        gradients.append([each.grad.to_local() for each in sharding.model.parameters()])
        sent = sharding.traffic.take()["gradients", "across_nodes"]
        counted = sharding.traffic.take_coded()
        assert sent > 0 and counted.weights == 0
        assert counted.gradient_bytes == (sent if coded and bits[1] != 16 else 0)
    assert all(map(torch.equal, *gradients))
