"""Which stream waits for what, recorded by streams that run nothing."""

import pytest
import torch

from zeropp import InputError
from zeropp.capabilities.incremental_updates.copies import UpdatedCopies
from zeropp.settings.sections import Zeropp
from zeropp.wire.cross_stream import CrossStreamTensor, HostCopy, refuse_capture

DEVICE = torch.device("cuda", 0)


class Event:
    """What was queued on a stream before it."""

    def __init__(self) -> None:
        self.done: frozenset[str] = frozenset()
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True


class Stream:
    """Its own work, by name, and what it has waited for."""

    def __init__(self) -> None:
        self.queued: set[str] = set()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.done = frozenset(self.queued)
        return event

    def wait_event(self, event: Event) -> None:
        self.queued |= event.done


class OnDevice:
    """A tensor of a GPU, of which nothing is asked but where it is."""

    is_cuda, device = True, DEVICE

    def __init__(self) -> None:
        self.users: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)


@pytest.fixture
def run_on(monkeypatch):
    """Make a stream the current one."""
    return lambda stream: monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)


def test_who_writes_in_place_waits_for_all_who_read(run_on):
    writer, readers = Stream(), [Stream(), Stream()]
    writer.queued = {"written"}
    run_on(writer)
    shared = CrossStreamTensor(OnDevice())
    for number, reader in enumerate(readers):
        run_on(reader)
        assert shared.on_current_stream() is shared.tensor
        assert "written" in reader.queued and reader in shared.tensor.users
        for use in ("first", "second"):
            reader.queued.add(f"{use} read of {number}")
            shared.note_read()
    run_on(writer)
    shared.on_current_stream()
    assert writer.queued == {"written"}  # to read, it waits for no reader
    assert shared.for_writing() is shared.tensor
    assert {"second read of 0", "second read of 1"} <= writer.queued


def test_copies_that_are_brought_up_to_date_wait_for_the_gathers_that_read_them(run_on):
    copies = UpdatedCopies(unit := torch.nn.Linear(1, 1), None, Zeropp())
    gathers, other = Stream(), Stream()
    run_on(gathers)
    copies._trained.add(unit)  # as its use does for a unit of FSDP2's
    copies.keep_copy(unit, OnDevice(), copies._version)
    copies.copy_of(unit)
    gathers.queued.add("sent in the node")
    copies.note_read(unit)
    copies.note_step()
    run_on(other)
    assert copies.get_outdated(unit) is not None
    assert "sent in the node" in other.queued


def test_values_are_waited_for_when_they_are_read(run_on, monkeypatch):
    """The copy is queued on the current stream, behind what computes the tensor."""
    computing = Stream()
    run_on(computing)
    events = []
    monkeypatch.setattr(
        computing, "record_event", lambda: events.append(Event()) or events[-1], raising=False
    )

    class Computed(torch.Tensor):
        is_cuda = True

    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options)
    )
    copy = HostCopy(torch.tensor([3, 4]).as_subclass(Computed))
    assert len(events) == 1 and not events[0].waited
    assert copy.tolist() == [3, 4] and events[0].waited


@pytest.mark.parametrize(("device", "captures"), [("cpu", True), ("cuda", False), ("cuda", True)])
def test_decisions_are_not_captured(monkeypatch, device, captures):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    if device == "cuda" and captures:
        with pytest.raises(InputError, match="^how to go is decided .* capture no passes"):
            refuse_capture(torch.device(device), "how to go")
    else:
        refuse_capture(torch.device(device), "how to go")
