"""What Offload queues on a GPU's streams, and what it waits for, on a device that only records."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zeropp.small_model import small_model
from zeropp import ZeroConfig, shard
from zeropp import fsdp_adapter as fsdp
from zeropp.capabilities.offload.host_masters import HOST, Offload
from zeropp.capabilities.offload.offloaded_adam import OffloadedAdam

GPU = torch.device("cuda", 0)


class RecordedGpuTensor(Tensor):
    """A tensor on the CPU that claims to be on a GPU and records what is done with it."""

    device, is_cuda = GPU, True
    calls: list[str]

    @classmethod
    def of(cls, values: Tensor, calls: list[str]) -> "RecordedGpuTensor":
        tensor = values.as_subclass(cls)
        tensor.calls = calls
        return tensor

    def record_stream(self, stream: "RecordedStream") -> None:
        self.calls.append(f"used by {stream.name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, Tensor.add_):
            next(each.calls for each in args if isinstance(each, cls)).append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class RecordedStream:
    """A stream with a name; its events record that the host waits for them."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def record_event(self) -> "RecordedStream":
        return self

    def synchronize(self) -> None:
        self.calls.append(f"host waits for {self.name}")


class Taken:
    """An Offload of one weight whose means arrive on a recorded GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, *, on_gpu: bool) -> None:
        self.calls: list[str] = []
        stream = RecordedStream("all-reduce stream", self.calls)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        self._callbacks: list[Any] = []
        patch.setattr(fsdp, "after_backward", self._callbacks.append)
        patch.setattr(fsdp, "backward_id", lambda: self.backward)
        self.backward = 0
        model = small_model(3)
        self.offload = Offload(shard(model, None, ZeroConfig()), HOST, ratio=1.0, pin_memory=False)
        self.parameter = model.embedding.weight
        self.gradient = torch.zeros(37, 12)
        master = self.offload._masters[self.parameter]
        if on_gpu:
            gradient = RecordedGpuTensor.of(self.gradient, self.calls)
            self.master = replace(master, gradients=(gradient,))
        else:
            self.master = replace(master, gradients=(self.gradient,))
        self.offload._masters[self.parameter] = self.master

    def take(self, value: float) -> None:
        mean = RecordedGpuTensor.of(torch.full((37, 12), value), self.calls)
        self.offload._take(self.parameter, mean)

    def end_backward(self, *, fails: bool = False) -> None:
        """PyTorch runs the callbacks of a pass at its end, and not those of one that failed."""
        while self._callbacks:
            callback = self._callbacks.pop(0)
            if not fails:
                callback()
        self.backward += 1


@pytest.mark.parametrize("on_gpu", [True, False], ids=["on the gpu", "on the host"])
def test_the_memory_of_a_mean_is_kept_until_its_copy_is_done(on_gpu, monkeypatch):
    """FSDP2 allocates it on the reduce-scatter stream, and it is copied on the all-reduce stream.

    Otherwise the next reduction gets the memory when the last reference goes.
    """
    taken = Taken(monkeypatch, on_gpu=on_gpu)
    for value, copy in ((1.0, "copy_"), (2.0, "add_" if on_gpu else "copy_")):
        taken.calls.clear()
        taken.take(value)
        assert taken.calls.count("used by all-reduce stream") == 1 and copy in taken.calls
    taken.end_backward()
    taken.offload.wait()
    assert (taken.gradient == 3.0).all()


def test_means_of_later_micro_batches_are_added_after_their_copies(monkeypatch):
    taken = Taken(monkeypatch, on_gpu=False)
    taken.take(1.0)
    taken.end_backward()
    taken.take(2.0)
    assert (taken.gradient == 1.0).all() and not any("host" in call for call in taken.calls)
    taken.end_backward()
    assert (taken.gradient == 3.0).all() and "host waits for all-reduce stream" in taken.calls
    monkeypatch.setattr(taken.offload, "_empty", None)  # what the second arrived in is used again
    taken.take(4.0)
    taken.end_backward()
    assert (taken.gradient == 7.0).all()


def test_a_step_waits_for_the_gradients_of_its_own_accord(monkeypatch):
    taken = Taken(monkeypatch, on_gpu=False)
    optimizer = OffloadedAdam(taken.offload, [{"params": [taken.parameter]}])
    taken.take(1.0)
    taken.end_backward()
    optimizer.step()
    assert "host waits for all-reduce stream" in taken.calls


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "not cleared"])
def test_what_a_failed_backward_would_have_added_is_dropped(clears, monkeypatch):
    taken = Taken(monkeypatch, on_gpu=False)
    taken.take(1.0)
    taken.end_backward()
    taken.take(100.0)
    taken.end_backward(fails=True)
    if clears:
        taken.master.weight.grad = None  # zero_grad()
        taken.take(1.0)
        taken.end_backward()
    taken.take(2.0)
    taken.end_backward()
    taken.offload.wait()
    assert (taken.gradient == 3.0).all()
