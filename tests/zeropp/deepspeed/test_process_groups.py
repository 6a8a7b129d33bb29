"""Which ranks an engine is on: `init_distributed`, with a launcher or without; `mesh_param`."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zeropp
from tests.launched import call
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import (
    SAMPLES,
    config_of,
    engine_of,
    gathered_parameters,
    run,
    run_without_engine,
)
from tests.zeropp.small_model import loss_of, small_model, tokens_of
from zeropp import Engine, InputError, deepspeed
from zeropp.ranks.coordination import among, broadcast_object, fail_together, gather_objects


def train(rank: int, init_method: str, folder: Path) -> None:
    """Write the losses of two steps, of one rank of two that no launcher has started."""
    deepspeed.init_distributed("gloo", init_method=init_method, rank=rank, world_size=2)
    engine = engine_of()
    assert (engine.global_rank, engine.world_size) == (rank, 2)
    (folder / str(rank)).write_text(repr(run(engine, steps=2)))


def train_as_task(rank: int, port: int, folder: Path) -> None:
    """The same of one task of two that srun has started."""
    task = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": 2}
    os.environ |= {name: str(value) for name, value in task.items()} | {"MASTER_PORT": str(port)}
    with deepspeed.zero.Init():  # joins the group
        model = small_model()
    assert os.environ["LOCAL_RANK"] == str(rank) and dist.get_rank() == rank
    (folder / f"task {rank}").write_text(repr(run(engine_of(model), steps=2)))


@ranks(2)
def expected_losses(folder: Path) -> None:
    """Write the losses of two ranks that have met as the launcher says."""
    losses = run(engine_of(), steps=2)
    if dist.get_rank() == 0:
        (folder / "launched").write_text(repr(losses))


def test_processes_that_no_launcher_started_meet_at_a_file_or_as_tasks_of_slurm(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = [call(train, rank, f"file://{tmp_path}/meeting", tmp_path) for rank in range(2)]
    processes += [call(train_as_task, rank, port, tmp_path) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 4
    expected_losses(folder=tmp_path)
    names = ("0", "1", "task 0", "task 1", "launched")
    assert len({(tmp_path / name).read_text() for name in names}) == 1


@ranks(2)
def test_ranks_that_have_met_need_not_meet_again():
    deepspeed.init_distributed("gloo", rank=dist.get_rank(), world_size=2)
    deepspeed.init_distributed("gloo", init_method="tcp://elsewhere:1")
    assert deepspeed.comm.get_world_size() == 2
    for options, message in (
        ({"rank": 7, "world_size": 9}, "rank = 7 and world_size = 9.*leave them out"),
        ({"distributed_port": 1}, "the launcher chooses the port"),
    ):
        with pytest.raises(InputError, match=message):
            deepspeed.init_distributed(**options)


@pytest.mark.parametrize(
    ("init_method", "reason"),
    [
        ("nowhere://there:1", "No rendezvous handler for nowhere"),
        ("tcp://there", "port number missing"),
    ],
)
def test_a_place_where_no_rank_can_meet(init_method, reason):
    with pytest.raises(InputError, match=f"cannot meet at '{init_method}'.*{reason}"):
        deepspeed.init_distributed("gloo", init_method=init_method, rank=0, world_size=2)


def test_a_rank_of_several_says_where_they_meet():
    with pytest.raises(InputError, match="rank = 1 and world_size = 2, and the launcher says 0"):
        deepspeed.init_distributed("gloo", rank=1, world_size=2)


HALVES = ([0, 1], [2, 3])


def half_mesh() -> DeviceMesh:
    """The mesh of this rank's half; every rank takes part in making both, as PyTorch requires."""
    return [DeviceMesh("cpu", half) for half in HALVES][dist.get_rank() // 2]


def engine_on(mesh: DeviceMesh, seed: int = 0, **settings) -> Engine:
    torch.manual_seed(seed)
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * seed)
    return zeropp.initialize(model=model, config=config_of(**settings), mesh_param=mesh)[0]


def run_on(engine: Engine, steps: int) -> list[float]:
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
    engine = engine_on(half_mesh(), stage=stage)
    assert engine.world_size == 2 and engine.global_rank == dist.get_rank()
    assert engine.batch.micro_samples == SAMPLES // 2
    expected, norms, model = run_without_engine(3)
    # As in test_engine: the same mean over 8 samples, added in another order.
    assert run_on(engine, 3) == pytest.approx(expected, rel=1e-5)
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
    engine = engine_on(half_mesh(), seed=dist.get_rank() // 2, stage=stage)
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
    engine = engine_on(mesh, seed=half + 1)
    if half == 0:
        run_on(engine, 1)  # the halves are in different states, and do not wait for each other
    path = engine.save_checkpoint(tmp_path / str(half))
    engine.save_16bit_model(tmp_path / str(half))
    weights = gathered_parameters(engine.module)
    again = engine_on(mesh)
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
            engine_on(mesh)
    both = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    with pytest.raises(InputError, match="one axis"):
        engine_on(both)
