"""The codes that nodes keep, in a checkpoint: who goes on from them, and who begins anew."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, logged, run
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.sharded_training import (
    BOTH,
    restore_codes,
    shard_on_nodes,
    step,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine
from zeropp.checkpoint import engine_checkpoint
from zeropp.checkpoint.kept_codes import codes_to_load, codes_to_save, without_codes

BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
SAVED_CODES = "cannot use the checkpoint's weight codes, which "
SAVED, RESUMED = 3, 2  # steps before and after
# Fast enough for codes of some shards to move further than those of others.
ADAMW = {"type": "AdamW", "params": {"lr": 4e-3, "torch_adam": True}}


@contextmanager
def lines_about_codes() -> Iterator[list[str]]:
    """What this rank logs in the block about a checkpoint's codes, and about copies that differ."""
    with logged() as lines:
        yield lines
    lines[:] = [each for each in lines if each.startswith((SAVED_CODES, "the copies of"))]
    assert dist.get_rank() == 0 or not lines


def engine_with(
    precision: dict,
    *,
    steps: bool = True,
    model: torch.nn.Module | None = None,
    **zeropp: object,
) -> Engine:
    """An engine with steps of codes on nodes of two; `zeropp` may say otherwise."""
    settings = {"ranks_per_node": 2, "weight_steps": steps, "code_messages": True, **zeropp}
    hpz = 2 if settings["ranks_per_node"] == 2 else 16
    zero = ALL_THREE | {"zero_hpz_partition_size": hpz}
    return engine_of(model, zero_optimization=zero, zeropp=settings, optimizer=ADAMW, **precision)


def evaluate(engine: Engine) -> float:
    """A loss of which all ranks have the same, as they see the same tokens."""
    engine.eval()
    with torch.no_grad():
        loss = loss_of(engine, tokens_of(0)).item()
    engine.train()
    return loss


def save_trained(folder: Path, precision: dict, *, updated: bool) -> Engine:
    """Save an engine, maybe with copies that are up to date, and return it."""
    engine = engine_with(precision)
    run(engine, SAVED)
    if updated:
        evaluate(engine)
    engine.save_checkpoint(folder)
    return engine


def loaded(folder: Path, engine: Engine) -> float:
    """The loss of an engine that has loaded what was saved."""
    engine.load_checkpoint(folder)
    return evaluate(engine)


def going_on(engine: Engine) -> list[float]:
    return run(engine, RESUMED, first=SAVED)


@pytest.mark.parametrize("updated", [True, False])
@ranks(4, timeout=120)
def test_codes_of_another_type_are_not_read(updated, tmp_path):
    """The first loss is that of whole codes, as without steps."""
    save_trained(tmp_path, BF16, updated=updated)
    for precision in (FP16, {}):
        with lines_about_codes() as lines:
            loss = loaded(tmp_path, engine_with(precision))
        expected = loaded(tmp_path, engine_with(precision, steps=False))
        assert loss == expected
        if dist.get_rank() == 0:
            assert lines == [
                f"{SAVED_CODES}belong to other shards or another format than this run's: whole "
                "codes cross the nodes once more"
            ]


@pytest.mark.parametrize("updated", [True, False])
@ranks(4, timeout=120)
def test_other_nodes_go_on_from_the_codes_of_each_shard(updated, tmp_path):
    """Without nodes of two, all four ranks exchange messages.

    The widths that the pairs of ranks had come to would differ among the four.
    """
    engine = save_trained(tmp_path, BF16, updated=updated)
    loss, later = evaluate(engine), going_on(engine)
    with lines_about_codes() as lines:
        for size in (2, 1):
            engine = engine_with(BF16, ranks_per_node=size, weight_step_check_interval=1)
            first, others = loaded(tmp_path, engine), going_on(engine)
            assert size == 1 or (first, others) == (loss, later)
            assert first == loss or not updated
    assert not lines


@ranks(4)
def test_codes_that_do_not_say_what_they_are_of_are_dropped(tmp_path):
    """As earlier versions saved them."""

    def without_records(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        saved = codes_to_save(model)
        return {
            name.replace(".kept.", ".steps."): tensor[2:] if ".kept." in name else tensor
            for name, tensor in saved.items()
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_checkpoint, "codes_to_save", without_records)
        save_trained(tmp_path, BF16, updated=True)
    with lines_about_codes() as lines:
        loss = loaded(tmp_path, engine_with(BF16))
    expected = loaded(tmp_path, engine_with(BF16, steps=False))
    assert loss == expected
    if dist.get_rank() == 0:
        (line,) = lines
        assert line.startswith(f"{SAVED_CODES}are of an earlier version, which did not save what")


@pytest.mark.parametrize(("kind", "place"), [("codes", 40), ("kept", -1)])
@ranks(4)
def test_codes_that_are_damaged_are_dropped_on_all_ranks(kind, place, tmp_path):
    """One bit of one rank: in its codes, or in what decides how far codes may move."""

    def damaged(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        saved = {name: tensor.clone() for name, tensor in codes_to_save(model).items()}
        if dist.get_rank() == 1:
            saved[f"rank1.{kind}.blocks.0"][place] ^= 64
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_checkpoint, "codes_to_save", damaged)
        save_trained(tmp_path, BF16, updated=True)
    with lines_about_codes() as lines:
        loss = loaded(tmp_path, engine_with(BF16))
    expected = loaded(tmp_path, engine_with(BF16, steps=False))
    assert loss == expected
    if dist.get_rank() == 0:
        assert lines == [f"{SAVED_CODES}are damaged: whole codes cross the nodes once more"]


@ranks(4)
def test_weights_that_a_checkpoint_does_not_hold_are_not_those_of_its_codes(tmp_path):
    """A frozen weight that is left out, beside trained ones, is another one where it is loaded."""

    def model_with(value: float) -> torch.nn.Module:
        model = small_model()
        frozen = model.blocks[1].up.weight.requires_grad_(False)
        frozen.data.fill_(value)
        return model

    first = engine_with(BF16, model=model_with(0.1))
    run(first, 2)
    evaluate(first)
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    results = []
    for steps in (True, False):
        engine = engine_with(BF16, steps=steps, model=model_with(-0.3))
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        results.append(evaluate(engine))
    assert results[0] == results[1]


@ranks(4)
def test_only_the_same_number_of_ranks_goes_on_from_codes():
    sharding = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    assert codes_to_save(sharding.model) == {}
    step(sharding, optimizer, 0)
    step(sharding, optimizer, 1)
    saved = {name: tensor.clone() for name, tensor in codes_to_save(sharding.model).items()}
    rank = dist.get_rank()
    kinds = {name.split(".")[1] for name in saved}
    assert kinds == {"codes", "kept"} and len(saved) == 2 * len(sharding.units)
    assert without_codes({**saved, "model.weight": torch.ones(1)}).keys() == {"model.weight"}
    of_all = {
        name.replace(f"rank{rank}", f"rank{r}"): t for r in range(4) for name, t in saved.items()
    }
    assert codes_to_load(sharding.model, of_all).tensors.keys() == saved.keys()
    of_two = {name: tensor for name, tensor in of_all.items() if name[:5] in ("rank0", "rank1")}
    with lines_about_codes() as lines:
        codes = codes_to_load(sharding.model, of_two)
        codes.restore()
    assert codes.tensors == {}
    if rank == 0:
        (line,) = lines
        assert line.startswith(f"{SAVED_CODES}are of 2 ranks, and there are 4:")
    other = shard_on_nodes(BOTH, small_model(), zeropp={"weight_steps": True})
    restore_codes(other.model, saved)
    for name, tensor in codes_to_save(other.model).items():
        assert torch.equal(tensor, saved[name])


@ranks(4)
def test_codes_of_weights_that_were_written_since_are_not_saved_and_not_gone_on_from():
    sharding = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
    optimizer = torch.optim.SGD(sharding.model.parameters(), lr=0.1)
    step(sharding, optimizer, 0)
    evaluate(sharding.model)
    saved = {name: tensor.clone() for name, tensor in codes_to_save(sharding.model).items()}
    state = {name: tensor.clone() for name, tensor in sharding.model.state_dict().items()}
    if dist.get_rank() == 2:
        sharding.model.blocks[1].up.bias.detach().mul_(0.5)
    unsaved = saved.keys() - codes_to_save(sharding.model).keys()
    assert {name.partition(".")[2] for name in unsaved} == {"codes.blocks.1", "kept.blocks.1"}
    losses = []
    for notifies in (True, False):
        other = shard_on_nodes(BOTH, zeropp={"weight_steps": True})
        other.model.load_state_dict(state)
        restore_codes(other.model, saved)
        with torch.no_grad():
            for weight in other.model.parameters():
                weight.mul_(2.0)
        if notifies:
            other.weights_changed()
        losses.append(evaluate(other.model))
    assert losses[0] == losses[1]


@ranks(4)
def test_without_steps_nothing_is_saved():
    sharding = shard_on_nodes(BOTH)
    step(sharding, torch.optim.SGD(sharding.model.parameters(), lr=0.1), 0)
    assert codes_to_save(sharding.model) == {}
