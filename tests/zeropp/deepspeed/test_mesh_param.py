"""`mesh_param`: an engine on a part of the ranks has nothing to do with the others."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zeropp
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    SAMPLES,
    config_of,
    gathered_parameters,
    run_without_engine,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine, InputError
from zeropp.ranks.coordination import among, broadcast_object, fail_together, gather_objects

HALVES = ([0, 1], [2, 3])


def half_mesh() -> DeviceMesh:
    """The mesh of this rank's half; every rank takes part in making both, as PyTorch requires."""
    return [DeviceMesh("cpu", half) for half in HALVES][dist.get_rank() // 2]


def engine_of(mesh: DeviceMesh, seed: int = 0, **settings) -> Engine:
    torch.manual_seed(seed)
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * seed)
    return zeropp.initialize(model=model, config=config_of(**settings), mesh_param=mesh)[0]


def run(engine: Engine, steps: int) -> list[float]:
    """Losses of steps, averaged over the ranks of the engine's mesh."""
    losses = []
    for step in range(steps):
        group = engine.sharding.group
        tokens = tokens_of(step, SAMPLES).chunk(engine.world_size)[dist.get_rank(group)]
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        mean = loss.detach()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / engine.world_size)
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
@ranks(4)
def test_each_half_trains_as_if_it_were_all(stage):
    engine = engine_of(half_mesh(), stage=stage)
    assert engine.world_size == 2 and engine.global_rank == dist.get_rank()
    assert engine.batch.micro_samples == SAMPLES // 2
    expected, norms, model = run_without_engine(3)
    # As in test_engine: the same mean over 8 samples, added in another order.
    assert run(engine, 3) == pytest.approx(expected, rel=1e-5)
    assert engine.get_global_grad_norm() == pytest.approx(norms[2], rel=1e-4)


@ranks(4)
def test_samples_are_divided_among_the_ranks_of_the_mesh():
    data = torch.arange(32)
    loader = zeropp.initialize(
        model=small_model(), config=config_of(), mesh_param=half_mesh(), training_data=data
    )[2]
    mine = [number for batch in loader for number in batch.tolist()]
    of_all = [None] * 4
    dist.all_gather_object(of_all, mine)
    assert sorted(of_all[0] + of_all[1]) == list(range(32)) == sorted(of_all[2] + of_all[3])


@pytest.mark.parametrize("stage", [0, 3])
@ranks(4)
def test_weights_written_on_one_mesh_are_not_those_of_the_other(stage):
    engine = engine_of(half_mesh(), seed=dist.get_rank() // 2, stage=stage)
    weight = next(iter(engine.module.parameters()))
    writer = HALVES[dist.get_rank() // 2][1]
    with zeropp.zero.GatheredParameters(weight, modifier_rank=writer):
        if dist.get_rank() == writer:
            with torch.no_grad():
                weight.fill_(writer)
    with zeropp.zero.GatheredParameters(weight):
        assert (weight == writer).all()
    other = HALVES[1 - dist.get_rank() // 2][0]
    with pytest.raises(InputError, match=f"modifier_rank = {other}: .* over the ranks"):
        with zeropp.zero.GatheredParameters(weight, modifier_rank=other):
            pass


@ranks(4)
def test_each_half_saves_and_loads_its_own_checkpoint(tmp_path):
    half = dist.get_rank() // 2
    mesh = half_mesh()
    engine = engine_of(mesh, seed=half + 1)
    if half == 0:
        run(engine, 1)  # the halves are in different states, and do not wait for each other
    path = engine.save_checkpoint(tmp_path / str(half))
    engine.save_16bit_model(tmp_path / str(half))
    weights = gathered_parameters(engine.module)
    again = engine_of(mesh)
    if half == 1:
        again.load_checkpoint(tmp_path / "1")
        assert again.global_steps == 0
        for name, weight in gathered_parameters(again.module).items():
            assert torch.equal(weight, weights[name])
    dist.barrier()
    assert (tmp_path / "0/pytorch_model.bin").exists() and (tmp_path / "1/latest").exists()
    assert len([*path.glob("*.distcp")]) == 2


@ranks(4)
def test_what_ranks_do_together_they_do_on_their_mesh():
    with among(half_mesh().get_group()):
        half = dist.get_rank() // 2
        assert gather_objects(dist.get_rank()) == HALVES[half]
        assert broadcast_object(dist.get_rank()) == HALVES[half][0]
        if half == 1:
            with pytest.raises(InputError, match="rank 3"), fail_together():
                if dist.get_rank() == 3:
                    raise InputError("rank 3")
    assert gather_objects(dist.get_rank()) == [0, 1, 2, 3]


@ranks(4)
def test_a_mesh_without_this_rank_or_of_two_axes():
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() >= 2:
        with pytest.raises(InputError, match=r"not in the mesh of ranks \[0, 1\]"):
            engine_of(mesh)
    both = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    with pytest.raises(InputError, match="one axis"):
        engine_of(both)
