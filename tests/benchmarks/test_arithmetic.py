"""What could be wrong in a benchmark without a word: order, statistics, tables, clocks, checks."""

import gc
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory.model_state import formula, live_storages, paper
from benchmarks.shared.interleaved import (
    Disagreement,
    interleaved,
    quartiles,
    ratio_summary,
    time_interleaved,
)
from benchmarks.shared.table import RATIOS, Column, table
from benchmarks.shared.timers import THREAD_CLOCK, WALL_CLOCK, CpuTimer, GpuTimer
from benchmarks.shared.training_setup import TrainingSetup
from benchmarks.step import save_stall
from benchmarks.step.comparison import (
    VERIFIED_STEPS,
    largest_differences,
    require_agreement,
    tolerances,
    verify,
)
from benchmarks.step.copy_overlap import overlapped_share, union
from benchmarks.step.training_loops import TrainingLoop, fsdp2, sharded
from megatron_zpp.parallel.mesh import Ranks
from tests.ranks import ranks
from zeropp.checkpoint.async_save import AsyncWriter
from zeropp.ranks.topology import Environment

REFERENCE = [(6.0, 1.0), (5.9, 0.9)]
TINY = {
    "layers": 1, "hidden": 32, "heads": 2, "seq": 16, "vocab": 100, "micro-batch": 1,
    "micro-batches": 2,
}  # fmt: skip


def test_every_second_round_runs_backwards_and_each_work_has_one_time_per_round():
    assert list(interleaved(["a", "b", "c"], 3)) == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    calls = []
    works = {name: (lambda name=name: calls.append(name)) for name in "ab"}

    def seconds_of(work) -> float:
        work()
        return float(len(calls))

    assert time_interleaved(works, 2, seconds_of) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}


def test_ratios_are_taken_round_by_round_and_quartiles_of_few_values_are_their_ends():
    summary = ratio_summary([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert summary == {"ratio": 2.0, "quartiles": [1.0, 3.0]}
    with pytest.raises(ValueError):
        ratio_summary([1.0], [1.0, 2.0])
    assert quartiles([3.0, 1.0, 2.0]) == [1.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0]) == [1.25, 3.75]


def test_columns_say_unit_and_format_and_cells_are_padded():
    rows = [
        {"name": "a", "seconds": 0.0015, "ratio": 1.0, "quartiles": [0.5, 2.0], "bytes": None},
        {"name": "longer", "seconds": 2.0, "ratio": None, "quartiles": None, "bytes": 3_000_000},
    ]
    columns = Column("ms", "seconds", ".1f", 1e3), Column("MB", lambda row: row["bytes"], "", 1e-6)
    assert table(rows, Column("", "name"), *columns, *RATIOS).splitlines() == [
        "|        |     ms |  MB | ratio |  its quartiles |",
        "| ------ | -----: | --: | ----: | -------------: |",
        "| a      |    1.5 |   - | 1.000 | 0.500 to 2.000 |",
        "| longer | 2000.0 | 3.0 |     - |              - |",
    ]


class FakeGpu:
    """Replaces torch.cuda: records what is queued, one entry per millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued = queued = []

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                queued.append("event")
                self.at = len(queued)

            def elapsed_time(self, end: "Event") -> float:
                return float(end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: queued.append("wait for all"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queued.append("sleep"))
        properties = SimpleNamespace(L2_cache_size=64)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize("cold", [False, True])
def test_the_gpu_is_given_all_work_before_it_begins(cold: bool, monkeypatch):
    gpu = FakeGpu(monkeypatch)
    timer = GpuTimer(torch.device("cpu"))
    clear = timer._empty_cache
    monkeypatch.setattr(timer, "_empty_cache", lambda: (clear(), gpu.queued.append("flush")))
    seconds = timer.mean_seconds(lambda: gpu.queued.append("run"), 3, cold=cold)
    once = ["flush", "run"] if cold else ["run"]
    timed = ["flush", "event", "run", "event"] * 3 if cold else ["event", *["run"] * 3, "event"]
    assert gpu.queued == [*once, "wait for all", *once, "sleep", *timed, "wait for all"]
    assert seconds == pytest.approx(2e-3 if cold else 4e-3 / 3)
    assert timer._flushed is None or timer._flushed.numel() == 4 * 64


def test_clocks_count_what_they_say():
    assert CpuTimer(WALL_CLOCK).mean_seconds(lambda: time.sleep(0.02), 3) >= 0.02
    assert CpuTimer(THREAD_CLOCK).mean_seconds(lambda: time.sleep(0.02), 3) < 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_copy_on_a_gpu_takes_as_long_as_its_bytes_need():
    device = torch.device("cuda", 0)
    small, large = (torch.ones(1 << power, dtype=torch.uint8, device=device) for power in (24, 28))
    timer = GpuTimer(device)
    for cold in (False, True):
        short, long = (  # the least of several, as others may use the GPU meanwhile
            min(timer.mean_seconds(data.clone, 5, cold=cold) for _ in range(5))
            for data in (small, large)
        )
        assert 2 * short < long and 2 * large.nbytes / long < 20e12  # bytes per second
    assert timer.seconds(large.clone) > 0


def test_the_share_of_the_copies_that_kernels_cover():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlapped_share([(0, 4), (2, 6)], [(1, 2), (5, 9)]) == pytest.approx(2 / 6)
    assert overlapped_share([(0, 1)], []) == 0.0 and overlapped_share([], [(0, 1)]) == 1.0


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([(6.0, 1.0), (5.88, 0.9)], "peer and ours do not train alike: loss differs"),
        ([(6.0, 1.01), (5.9, 0.9)], "gradient norm differs"),
        ([(math.nan, 1.0), (5.9, 0.9)], "loss differs by nan"),
        ([(6.0, 1.0), (math.nan, 0.9)], "loss differs by nan"),
    ],
)
def test_different_histories_do_not_agree(history: list[tuple[float, float]], message: str):
    allowed = tolerances("bf16", 1)
    require_agreement("peer", "ours", largest_differences(REFERENCE, REFERENCE), allowed)
    with pytest.raises(Disagreement, match=message):
        require_agreement("peer", "ours", largest_differences(history, REFERENCE), allowed)


@ranks(2)
def test_loops_that_train_differently_are_not_timed():
    count = dist.get_world_size()
    place = Environment(rank=dist.get_rank(), world_size=count)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("data",))
    own = Ranks(environment=place, device=torch.device("cpu"), mesh=mesh, store=None)
    setup = TrainingSetup(shape=TINY, ranks=own)
    steps = setup.steps(VERIFIED_STEPS + 1)
    right, wrong = (fsdp2(setup, name, iter(steps)) for name in ("right", "wrong"))
    wrong.optimizer.param_groups[0]["lr"] *= 1.01
    with pytest.raises(Disagreement, match="wrong and right do not train alike: update"):
        verify([right, wrong], setup)
    late_steps = iter(steps[1:])  # other micro-batches than the rest
    loops = [fsdp2(setup, "right", iter(steps)), sharded(setup, "late", late_steps)]
    with pytest.raises(Disagreement, match="late and right do not train alike: loss"):
        verify(loops, setup)


class DifferentSaves(save_stall.Saves):
    """Writes another byte in one of the two checkpoints."""

    def differences(self) -> list[str]:
        folder = self.folders[save_stall.SYNCHRONOUS]
        with open(folder / "iter_0000001" / "__0_0.distcp", "r+b") as file:
            file.write(b"x")
        return super().differences()


def test_different_checkpoints_are_not_timed(tmp_path: Path):
    model, nothing = nn.Linear(3, 3), lambda: None
    optimizer = torch.optim.AdamW(model.parameters())
    loop = TrainingLoop(name="", model=model, optimizer=optimizer, step=nothing)
    with AsyncWriter() as writer:
        assert save_stall.verify(save_stall.Saves(loop, tmp_path, writer)) > 0
        with pytest.raises(Disagreement, match=r"differ in \['__0_0.distcp'\]"):
            save_stall.verify(DifferentSaves(loop, tmp_path, writer))


def test_storages_are_counted_once_and_none_is_overlooked():
    gc.collect()  # or what other tests left goes in between
    before = sum(live_storages().values())
    hidden = torch.zeros(1000, requires_grad=True)
    views = [hidden[:10], hidden.view(10, 100)]
    hidden.sum().backward()  # a gradient of as many elements
    with FakeTensorMode():
        fake = torch.zeros(1000)
    assert sum(live_storages().values()) - before == 8000
    del views, fake


@pytest.mark.parametrize("count", [2, 4, 64])
def test_formula_is_the_papers_but_for_what_the_engine_keeps_twice(count):
    extra = {"bf16": (2, 2, 2 / count, 0), "fp32": (4, 4 / count, 4 / count, 0)}
    for dtype, differences in extra.items():
        for stage, difference in enumerate(differences):
            excess = formula(stage, count, dtype) - paper(stage, count, dtype)
            assert excess == pytest.approx(difference)
