"""The harness itself: what it shows when a rank fails, hangs, dies or skips."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import ranks

FAILED = pytest.fail.Exception
SLEEP_SECONDS = 60  # of ranks that nothing wakes; no test waits for them


@dataclass(frozen=True)
class Size:
    rows: int


@pytest.fixture
def size() -> Size:
    return Size(rows=3)


@ranks(4)
@pytest.mark.parametrize("factor", [1, 2])
def test_ranks_see_each_other(factor: int, size: Size, tmp_path: Path) -> None:
    rank = dist.get_rank()
    total = torch.full((size.rows,), float(rank * factor))
    dist.all_reduce(total)
    assert total.tolist() == [6.0 * factor] * 3
    (tmp_path / f"{rank}").touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


@ranks(4, ranks_per_node=2)
def test_environment_of_two_nodes() -> None:
    rank = dist.get_rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [int(os.environ[name]) for name in names] == [rank, 4, rank % 2, 2, rank // 2]
    assert torch.get_num_threads() == 1


@ranks(1)
def test_one_rank() -> None:
    assert dist.get_world_size() == 1


@ranks(2)
def note_pid(folder: Path) -> None:
    (folder / f"{dist.get_rank()}").write_text(str(os.getpid()))
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


@ranks(2)
def expect_clean(folder: Path, first_random: float) -> None:
    assert "LEFT_BEHIND" not in os.environ
    assert os.getcwd() == str(folder)
    assert torch.rand(()).item() == first_random


def pids(folder: Path) -> list[int]:
    note_pid(folder=folder)
    return [int((folder / f"{rank}").read_text()) for rank in range(2)]


def test_processes_are_reused_and_clean(tmp_path: Path) -> None:
    assert pids(tmp_path) == pids(tmp_path)
    generator = torch.Generator().manual_seed(0)
    expect_clean(folder=Path.cwd(), first_random=torch.rand((), generator=generator).item())


@ranks(4)
def fail_on_rank_two() -> None:
    print(f"rank {dist.get_rank()} was here")
    value = dist.get_rank() * 10
    if dist.get_rank() == 2:
        assert value == 21
    dist.barrier()


def test_first_failure_is_shown() -> None:
    with pytest.raises(FAILED) as failure:
        fail_on_rank_two()
    text = str(failure.value)
    assert "rank 2 of 4 failed first" in text
    assert "assert 20 == 21" in text
    assert "fail_on_rank_two" in text and "test_ranks.py" in text
    assert "rank 0 was here" in text


@ranks(2, timeout=1)
def hang_on_rank_one() -> None:
    print("before the end", flush=True)
    if dist.get_rank() == 1:
        time.sleep(SLEEP_SECONDS)


def test_hung_rank_is_killed_and_named(tmp_path: Path) -> None:
    before = pids(tmp_path)
    began = time.monotonic()
    with pytest.raises(FAILED) as failure:
        hang_on_rank_one()
    assert time.monotonic() - began < SLEEP_SECONDS
    text = str(failure.value)
    assert "still running after 1 s and killed: rank 1" in text
    assert "in hang_on_rank_one" in text  # where it hung
    assert "before the end" in text
    with pytest.raises(ProcessLookupError):
        os.kill(before[1], 0)
    after = pids(tmp_path)
    assert after[0] == before[0] and after[1] != before[1]


@ranks(2)
def fail_on_rank_zero(how: str) -> None:
    """The other rank waits for long, or for ever."""
    if dist.get_rank() == 0:
        if how == "raises":
            raise RuntimeError("no use")
        if how == "exits":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SLEEP_SECONDS)


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("raises", "RuntimeError: no use"),
        ("exits", "SystemExit: 3"),
        ("dies", "rank 0 of 2 died: killed by SIGKILL"),
    ],
)
def test_a_failure_does_not_wait_for_the_others(how: str, shown: str, tmp_path: Path) -> None:
    before, began = pids(tmp_path), time.monotonic()
    with pytest.raises(FAILED, match=shown):
        fail_on_rank_zero(how=how)
    assert time.monotonic() - began < SLEEP_SECONDS
    assert pids(tmp_path)[1] != before[1]  # who slept was killed


@ranks(2)
def skip_everywhere() -> None:
    pytest.skip("no such device")


def test_skip_propagates() -> None:
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        skip_everywhere()


@ranks(2)
def take(value: object) -> None:
    pass


def test_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="argument 'value' cannot be sent"):
        take(value=lambda: None)
