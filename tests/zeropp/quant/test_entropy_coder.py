"""Rows coded by rANS: what arrives was sent, or is refused; CPU and GPU write the same bytes."""

import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu import GPU, MARKS
from zeropp.quant import entropy_coder
from zeropp.quant.cpu import CpuKernels
from zeropp.quant.entropy_coder import RowCoding, coded_bytes, coding_of, decode, encode
from zeropp.quant.packing import ROTATED_4, row_layout

ROUND_TRIPS = int(os.environ.get("ZPP_CODED_MESSAGES", 2_000))
DAMAGES = int(os.environ.get("ZPP_DAMAGED_MESSAGES", 2_000))
SIZES = (16, 48, 96, 1008, 4096, 20_016)


@pytest.fixture
def on_gpu(emulated, monkeypatch) -> Callable[[bool], None]:
    """Let the kernels of GPUs run, emulated, or those of CPUs again."""
    kernels = {True: CpuKernels(emulated), False: entropy_coder._kernels(torch.empty(0))}

    def choose(emulates: bool) -> None:
        monkeypatch.setattr(entropy_coder, "_kernels", lambda _: kernels[emulates])

    return choose


def case_of(draw: random.Random, size: int, count: int = 1) -> tuple[Tensor, Tensor, RowCoding]:
    """Rows, what is held of them and how they are coded: bytes or differences of any entropy."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    held = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    moves = torch.randn(count, size, generator=generator) * 10 ** draw.uniform(-1.5, 2)
    if draw.random() < 0.3:  # only part of the row is easy to code
        moves[:, : draw.randrange(size + 1)] *= 100
    first, kind = draw.randrange(size // 16 + 1) * 16, draw.randrange(3)
    end = first + (size - first) // 12 * 12 if kind == 1 else draw.randrange(first, size + 1)
    rows = ((held if kind == 2 else 8) + moves.round().int()).to(torch.uint8)
    codes = (0, size) if kind == 2 else (first, end)
    return rows, held, RowCoding(size, codes, has_threes=kind == 1, is_difference=kind == 2)


def sent(rows: Tensor, held: Tensor, coding: RowCoding) -> tuple[Tensor, Tensor]:
    coded = torch.full((len(rows), coded_bytes(coding) + 16), 7, dtype=torch.uint8)
    lengths = torch.empty(len(rows), dtype=torch.int64)
    encode(rows, coded, lengths, coding, held if coding.is_difference else None)
    for message, length in zip(coded, lengths.tolist(), strict=True):
        assert length <= coded_bytes(coding) and (message[length:] == 7).all()
    return coded, lengths


def arrives(rows: Tensor, held: Tensor, coding: RowCoding, coded: Tensor, lengths: Tensor) -> bool:
    arrived, status = held.clone(), torch.full((len(held),), 9, dtype=torch.int32)
    decode(coded, lengths, arrived, status, coding)
    return not status.any() and torch.equal(arrived, rows)


def test_random_messages_arrive_as_they_were():
    draw = random.Random(0)
    for number in range(ROUND_TRIPS):
        size = SIZES[number % len(SIZES)] if number % 100 < 6 else draw.choice((96, 1008))
        rows, held, coding = case_of(draw, size)
        assert arrives(rows, held, coding, *sent(rows, held, coding)), number


def test_gpu_and_cpu_write_and_read_the_same_bytes(on_gpu):
    draw = random.Random(1)
    for number in range(24):
        rows, held, coding = case_of(draw, SIZES[number % len(SIZES)], count=1 + number % 7)
        messages = []
        for emulates in (False, True):
            on_gpu(emulates)
            messages.append(sent(rows, held, coding))
            on_gpu(not emulates)
            assert arrives(rows, held, coding, *messages[-1]), number
        assert all(torch.equal(*pair) for pair in zip(*messages, strict=True)), number


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS) for kind in range(3)])
def test_a_gpu_waits_for_nothing_and_keeps_the_order_of_streams(kind):
    """A stream codes what another has yet to write; a third decodes what has yet to be coded."""
    draw = random.Random(kind)
    cases = (case_of(draw, 20_016, count=3) for _ in range(100))
    rows, held, coding = next(case for case in cases if case[2].is_difference == bool(kind))
    expected, lengths = sent(rows, held, coding)
    source, receiver, coded = rows.to(GPU), held.to(GPU), expected.to(GPU)
    late, arrived, there = torch.zeros_like(source), receiver.clone(), lengths.to(GPU)
    status = torch.ones(3, dtype=torch.int32, device=GPU)
    before = receiver if coding.is_difference else None
    encode(source, coded, there, coding, before)  # loads the library
    coded.fill_(7)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10**8)
        late.copy_(source)
    streams[1].wait_stream(streams[0])
    with torch.cuda.stream(streams[1]):
        encode(late, coded, there, coding, before)
    streams[2].wait_stream(streams[1])
    with torch.cuda.stream(streams[2]):
        decode(coded, there, arrived, status, coding)
    is_done = streams[2].query()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert not is_done and not status.any() and torch.equal(arrived, source)
    assert torch.equal(coded.cpu(), expected) and torch.equal(there.cpu(), lengths)


@pytest.mark.parametrize("emulates", [False, True])
def test_damaged_messages_are_refused(on_gpu, emulates):
    """Nothing outside the row is written. Bytes that are stored as they are have no checksum."""
    on_gpu(emulates)
    draw = random.Random(2)
    for number in range(DAMAGES // (20 if emulates else 1)):
        rows, held, coding = case_of(draw, draw.choice((1008, 4096)))
        coded, lengths = sent(rows, held, coding)
        length, damage = int(lengths[0]), draw.randrange(3)
        if damage == 0:
            lengths[0] = draw.randrange(length)
        elif damage == 1:
            coded[0, draw.randrange(length)] ^= 1 << draw.randrange(8)
        else:  # a number of the header, or where a tile ends
            at = draw.choice((0, 4, 8, 12, 528)) % (length // 4 * 4)
            coded[0, at : at + 4] = torch.tensor(list(draw.randbytes(4)), dtype=torch.uint8)
        memory, status = torch.full((3, coding.size), 7, dtype=torch.uint8), torch.zeros(1).int()
        memory[1] = held[0]
        decode(coded, lengths, memory[1:2], status, coding)
        is_stored = int(coded[0, 4]) == 2
        assert (memory[::2] == 7).all() and (damage or status.item()), number
        assert status.item() or is_stored or torch.equal(memory[1], rows[0]), number


def test_how_rows_of_a_layout_are_coded():
    four = coding_of(row_layout((640, 256, 5), (ROTATED_4, ROTATED_4, 16), torch.float32))
    three = coding_of(row_layout((1280, 640, 640), (3, 3, 36), torch.float32))
    assert four == RowCoding(496, (48, 496)) and three == RowCoding(
        1120, (80, 800), has_threes=True
    )


def test_other_tensors_are_refused():
    rows, lengths = torch.zeros(2, 96, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    coding, coded = RowCoding(96, (0, 96)), torch.zeros(2, 112, dtype=torch.uint8)
    for wrong in (
        (rows, rows, lengths),
        (rows.float(), coded, lengths),
        (rows, coded, lengths[1:]),
    ):
        with pytest.raises(ValueError, match=r"messages of|give"):
            encode(*wrong, coding)
    with pytest.raises(ValueError, match="status"):
        decode(coded, lengths, rows, lengths, coding)
