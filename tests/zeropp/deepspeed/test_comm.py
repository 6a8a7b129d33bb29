"""`deepspeed.init_distributed`: where ranks meet, with a launcher and without one."""

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launched import call
from tests.ranks import ranks
from tests.zeropp.deepspeed.small_engine import engine_of, run
from tests.zeropp.small_model import small_model
from zeropp import InputError, deepspeed


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
