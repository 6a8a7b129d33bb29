"""The timers: what they time, and the order in which the GPU's timer queues its work."""

import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.shared.timers import THREAD_CLOCK, WALL_CLOCK, CpuTimer, GpuTimer


class FakeGpu:
    """Replaces torch.cuda: records what is queued, one entry per millisecond."""

    def __init__(self) -> None:
        self.queued: list[str] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        queued = self.queued

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
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=64)
        )


@pytest.mark.parametrize("cold", [False, True])
def test_the_gpu_is_given_all_work_before_it_begins(cold: bool, monkeypatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    timer = GpuTimer(torch.device("cpu"))
    clear = timer._empty_cache
    monkeypatch.setattr(timer, "_empty_cache", lambda: (clear(), gpu.queued.append("flush")))
    seconds = timer.mean_seconds(lambda: gpu.queued.append("run"), 3, cold=cold)
    once = ["flush", "run"] if cold else ["run"]
    timed = ["flush", "event", "run", "event"] * 3 if cold else ["event", *["run"] * 3, "event"]
    assert gpu.queued == [*once, "wait for all", *once, "sleep", *timed, "wait for all"]
    assert seconds == pytest.approx(2e-3 if cold else 4e-3 / 3)
    assert timer._flushed is None or timer._flushed.numel() == 4 * 64


def test_a_run_is_timed_from_an_idle_device(monkeypatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    seconds = GpuTimer(torch.device("cpu")).seconds(lambda: gpu.queued.append("run"))
    assert gpu.queued == ["wait for all", "event", "run", "event", "wait for all"]
    assert seconds == pytest.approx(2e-3)


def test_sleeping_passes_time_but_takes_no_processor() -> None:
    assert CpuTimer(WALL_CLOCK).mean_seconds(lambda: time.sleep(0.02), 3) >= 0.02
    assert CpuTimer(THREAD_CLOCK).mean_seconds(lambda: time.sleep(0.02), 3) < 0.02
    assert CpuTimer(WALL_CLOCK).seconds(lambda: time.sleep(0.02)) >= 0.02


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_copy_on_a_gpu_takes_as_long_as_its_bytes_need() -> None:
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
