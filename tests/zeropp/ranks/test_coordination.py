"""What ranks do together; collectives are also exercised by the tests of those that call them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.ranks import ranks
from zeropp.errors import InputError
from zeropp.ranks.coordination import (
    RankError,
    broadcast_object,
    fail_together,
    gather_objects,
    rank,
    report_once,
    require_same,
    world_size,
)
from zeropp.ranks.topology import Environment

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = "import sys; from zeropp.ranks.launcher import main; sys.exit(main())"
REPORTING = """
import sys
from dataclasses import replace
from datetime import timedelta

from zeropp.ranks import coordination
from zeropp.ranks.topology import Environment

environment = Environment.read()
if sys.argv[1] == "rank 1 alone":
    coordination.REPORT_TIMEOUT = timedelta(seconds=1)
    if environment.rank == 0:
        import time; time.sleep(60)
if sys.argv[1] == "two machines":
    environment = replace(environment, machines=2, local_rank=0)
message = f"reported by rank {environment.rank}\\n"
coordination.report_once(environment, lambda: sys.stdout.write(message))
if sys.argv[1] == "two machines":  # which have launchers of their own: no rank ends the other
    import pathlib, time
    folder = pathlib.Path(__file__).parent
    (folder / f"reported{environment.rank}").touch()
    while len([*folder.glob("reported?")]) < 2:
        time.sleep(0.01)
sys.exit(7)
"""


def test_without_a_process_group_there_is_one_rank():
    assert (rank(), world_size()) == (0, 1)
    assert gather_objects("value") == ["value"] and broadcast_object("value") == "value"
    with pytest.raises(ZeroDivisionError), fail_together():
        raise ZeroDivisionError
    reports = []
    report_once(Environment(), lambda: reports.append("error"))
    assert reports == ["error"]


@ranks(2)
def test_objects_are_exchanged():
    assert gather_objects(("rank", dist.get_rank())) == [("rank", 0), ("rank", 1)]
    assert broadcast_object(dist.get_rank()) == 0


@ranks(2)
def test_ranks_that_do_not_have_the_same():
    require_same({"--lr": "0.1"}, "Give the same")
    own = {"--lr": f"0.{dist.get_rank() + 1}", "--save": "given"}
    if dist.get_rank() == 1:
        own |= {"PyTorch": "2.13"}
    lines = r"--lr is 0.1 on rank 0 and 0.2 on rank 1\n  PyTorch is absent on rank 0 and 2.13 on"
    with pytest.raises(InputError, match=f"^{lines} rank 1: Give the same$"):
        require_same(own, "Give the same")
    hosts = r" \(rank 0 is node0, rank 1 is node1\): Give the same$"
    host = f"node{dist.get_rank()}"
    with mock.patch("socket.gethostname", lambda: host), pytest.raises(InputError, match=hosts):
        require_same(own, "Give the same", caller="zeropp.shard")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InputError("no such corpus"), InputError),
        (OSError(28, "No space left", "/full"), OSError),
        (ValueError("neither"), RankError),
    ],
)
@ranks(2)
def test_what_raises_on_one_rank_raises_on_all(error, expected):
    kind = type(error) if dist.get_rank() == 1 else expected
    with pytest.raises(kind) as caught, fail_together():
        if dist.get_rank() == 1:
            raise error
    assert str(error) in str(caught.value)


@pytest.mark.parametrize(
    ("scenario", "reporters"),
    [("all ranks", "0"), ("two machines", "01"), ("rank 1 alone", "1")],
)
def test_an_error_before_the_ranks_have_joined_is_reported_once(scenario, reporters, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REPORTING)
    finished = subprocess.run(
        [
            *(sys.executable, "-c", LAUNCHER, "--num_ranks", "2", "--no_local_rank"),
            *(str(script), scenario),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = [f"reported by rank {rank}" for rank in reporters]
    assert sorted(finished.stdout.splitlines()) == lines, finished.stderr
    assert finished.returncode == 7


@ranks(2)
def test_ranks_without_a_launcher_hear_of_the_report_though_they_come_later():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = broadcast_object(server.getsockname()[1])
    place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_RANK": str(dist.get_rank())}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, place):
        environment, reports = Environment.read(), []

        def report():
            reports.append("error")
            dist.barrier()  # which the other rank comes from

        if environment.rank == 1:
            dist.barrier()
            time.sleep(0.1)  # in which a store would have ended that nobody holds
        assert not report_once(environment, report)
        assert len(reports) == (environment.rank == 0)
