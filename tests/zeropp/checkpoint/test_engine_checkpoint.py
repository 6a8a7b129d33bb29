"""An engine resumed from a checkpoint trains as if it had not stopped; errors while loading."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, gathered_parameters, logged, run
from tests.zeropp.prescribed_gradients import ALL_THREE
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine, InputError

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.02}}


def blank() -> torch.nn.Module:
    """The small model with other weights than those of `small_model`."""
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


@pytest.mark.parametrize("weight_steps", [False, True])
@ranks(4, ranks_per_node=2)
def test_a_loaded_checkpoint_replaces_what_nodes_keep(weight_steps, tmp_path):
    """hpZ: copies of the weights from before loading are not used after it.

    If their codes move by steps, those of the checkpoint are.
    """

    def engine(model: torch.nn.Module | None = None) -> Engine:
        return engine_of(
            model,
            micro_batches=2,
            zero_optimization=ALL_THREE,
            zeropp={"weight_steps": weight_steps},
        )

    first = engine()
    run(first, steps=2)
    first.save_checkpoint(tmp_path)
    trained = losses_of(first)
    expected = run(first, steps=2, first=2)
    second = engine(blank())
    untrained = losses_of(second)
    assert second.sharding.roots[0].kept.nbytes > 0
    second.load_checkpoint(tmp_path)
    assert losses_of(second) == trained != untrained
    assert run(second, steps=2, first=2) == expected
    first.load_checkpoint(tmp_path)
    assert run(first, steps=2, first=2) == expected


@ranks(2)
def save_on_two(folder: Path) -> None:
    engine = engine_of(stage=3)
    run(engine, steps=2)
    engine.save_checkpoint(folder, tag="here")
    losses = run(engine, steps=3, first=2)
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


@ranks(1)
def load_on_one(folder: Path) -> None:
    engine = engine_of(blank(), stage=1)
    engine.load_checkpoint(folder)
    # The same mean over 8 samples, added in another order: as in test_engine, 1e-5.
    expected = json.loads((folder / "losses.json").read_text())
    assert run(engine, steps=3, first=2) == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_loads_at_another_number_of_ranks_and_another_stage(tmp_path):
    save_on_two(folder=tmp_path)
    load_on_one(folder=tmp_path)


def losses_of(engine: Engine) -> float:
    with torch.no_grad():
        return loss_of(engine, tokens_of(0)).item()


@ranks(2)
def test_parts_can_be_loaded_alone(tmp_path):
    engine = engine_of(scheduler=SCHEDULE)
    run(engine, steps=3)
    engine.save_checkpoint(tmp_path)
    weights = engine_of(blank(), scheduler=SCHEDULE)
    weights.load_checkpoint(tmp_path, load_module_only=True)
    assert losses_of(weights) == losses_of(engine)
    assert weights.global_steps == 0 and not weights.optimizer.state
    some = engine_of(blank(), scheduler=SCHEDULE)
    some.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert some.global_steps == 3 and not some.optimizer.state and some.get_lr() == [0.0]
    del some.module.blocks[1]
    shorter = small_model()
    del shorter.blocks[1]
    shorter = engine_of(shorter)
    with pytest.raises(InputError, match="only in the checkpoint: blocks.1"):
        shorter.load_checkpoint(tmp_path, load_optimizer_states=False)
    shorter.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    for name, weight in gathered_parameters(shorter.module).items():
        assert torch.equal(weight, gathered_parameters(engine.module)[name])


@ranks(2)
def test_a_checkpoint_saved_again_under_its_name_is_the_newer_one(tmp_path):
    engine = engine_of()
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    assert not (tmp_path / "latest").exists()
    run(engine, steps=1)
    engine.save_checkpoint(tmp_path, tag="best")
    saved = sorted(path.name for path in tmp_path.iterdir())
    assert saved == ["best", "latest", "zero_to_fp32.py"]
    other = engine_of(blank())
    other.load_checkpoint(tmp_path, "best")
    assert other.global_steps == 1 and losses_of(other) == losses_of(engine)


@ranks(2)
def test_errors_are_raised_on_every_rank(tmp_path):
    engine = engine_of()

    def refused(folder: Path, message: str, **arguments: object) -> None:
        with pytest.raises(InputError) as raised:
            engine.load_checkpoint(folder, **arguments)
        assert message in str(raised.value)

    refused(tmp_path / "nowhere", "no complete checkpoint best in", tag="best")
    engine.save_checkpoint(tmp_path, save_latest=False)
    refused(tmp_path, "there are global_step0", tag="global_step7")
    for tag in ("", "a/b", "..", ".hidden", "latest"):
        with pytest.raises(InputError, match="is not a folder's name"):
            engine.save_checkpoint(tmp_path, tag=tag)
    with pytest.raises(InputError, match="and it is rank0, rank1"):
        engine.save_checkpoint(tmp_path, tag=f"rank{dist.get_rank()}")
    with pytest.raises(InputError, match="client_state may hold tensors, numbers"):
        engine.save_checkpoint(tmp_path, client_state={"path": run})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot save"):
        engine.save_checkpoint(tmp_path / "file")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["file", "global_step0", "zero_to_fp32.py"]


@ranks(2)
def test_a_folder_that_names_no_checkpoint_leaves_the_run_as_it_is(tmp_path):
    """DeepSpeed returns (None, None) with a warning, which programs ask for to start anew."""
    expected = run(engine_of(micro_batches=2), steps=2)
    engine = engine_of(micro_batches=2)
    tokens = tokens_of(0).chunk(2)[dist.get_rank()].chunk(2)
    engine.backward(loss_of(engine, tokens[0]))
    engine.step()
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.backward(loss_of(engine, tokens[1]))
    engine.step()
    assert engine.global_steps == 1
    assert run(engine, steps=1, first=1) == expected[1:]
    other = engine_of(blank())
    other.save_checkpoint(tmp_path, tag="only", save_latest=False)
    with logged() as lines:
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert dist.get_rank() or "latest does not exist, and nothing is loaded" in lines[-1]
    assert dist.get_rank() or lines[-1].endswith("there are only")


@pytest.mark.parametrize("torn", ["__1_0.distcp", ".metadata", "state.pt"])
@ranks(2)
def test_a_damaged_file_is_named(torn, tmp_path):
    """Empty, torn, or with other bytes."""
    engine = engine_of()
    file = engine.save_checkpoint(tmp_path) / torn
    content = file.read_bytes()
    for damaged, name in (
        (b"", torn), (content[: len(content) // 2], torn), (bytes(len(content)), ""),
    ):  # fmt: skip
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(damaged)
        dist.barrier()
        with pytest.raises(InputError, match=f"{name} is damaged: .* load another checkpoint"):
            engine.load_checkpoint(tmp_path)
