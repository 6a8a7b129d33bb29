"""Coded messages: what arrives is what was sent, or an error; no message takes more than it may."""

import random

import pytest
import torch
from torch import Tensor

from zeropp.quant import coded_message
from zeropp.quant.coded_message import (
    FRAME,
    FRAMES,
    ITEM,
    NUMBER,
    CodedError,
    Spans,
    decode,
    encode,
    most_bytes,
)

DAMAGES = 30_000  # messages that are cut, changed or made up
ROW = 96  # bytes


def random_bytes(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def changed(row: Tensor, share: float, most: int, seed: int) -> Tensor:
    """A row of which a share of the bytes differs by up to `most`."""
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randint(-most, most + 1, row.shape, generator=generator)
    moves *= torch.rand(row.shape, generator=generator) < share
    return (row.int() + moves).to(torch.uint8)


def threes_of(size: int) -> Spans:
    """Two places of codes of three bits, with other bytes around them."""
    return [(16, 40), (48, 48 + (size - 64) // 24 * 24)] if size >= 96 else []


@pytest.mark.parametrize("size", [0, 16, ROW, 4096, FRAME, 2 * FRAME + 48])
@pytest.mark.parametrize(("share", "most"), [(0.0, 1), (0.2, 1), (0.5, 3), (1.0, 255)])
def test_a_row_arrives_as_it_was(size, share, most):
    held = random_bytes(size, 0)
    row, rest = changed(held, share, most, 1), random_bytes(100, 2)
    for kinds in ({"held": held}, {}, {"threes": threes_of(size)}):
        message = encode(row, **kinds)
        assert len(message) <= most_bytes(size)
        arrived = held.clone()
        of_receiver = {"holds": True} if "held" in kinds else kinds
        assert decode(torch.cat((message, rest)), arrived, **of_receiver) == len(message)
        assert torch.equal(arrived, row)


def test_few_changes_take_few_bytes():
    """In a fifth of the codes by one: 0.92 bits a code are the least, 0.25 with none at all."""
    held = random_bytes(1 << 20, 0)
    for share, most_bits in ((0.2, 1.1), (0.0, 0.01)):
        moves = 2 * torch.randint(0, 2, held.shape, generator=torch.Generator().manual_seed(1)) - 1
        moves *= torch.rand(held.shape, generator=torch.Generator().manual_seed(2)) < share
        row = (held.int() + moves).to(torch.uint8)
        assert 8 * len(encode(row, held=held)) < most_bits * len(row)


def test_what_cannot_be_coded_grows_by_headers_alone():
    row = random_bytes(1 << 20, 0)
    assert len(encode(row)) <= len(row) + (1 << 20) // FRAME * (coded_message.OVERHEAD + ITEM) + 16


def test_threads_and_the_number_of_frames_change_no_byte(monkeypatch):
    held = random_bytes(3 * FRAME, 0)
    row = changed(held, 0.9, 100, 1)
    messages = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        messages.append(encode(row, held=held))
        arrived = held.clone()
        decode(messages[-1], arrived, holds=True)
        assert torch.equal(arrived, row)
    assert torch.equal(*messages)


def test_a_receiver_refuses_what_it_cannot_read():
    held = random_bytes(ROW, 0)
    damaged = encode(held)
    damaged[0] ^= 1
    with pytest.raises(CodedError, match="damaged header"):
        decode(damaged, held.clone())
    with pytest.raises(CodedError, match="kind 1"):
        decode(encode(held, held=held), held.clone())
    with pytest.raises(CodedError, match="kind 2"):
        decode(encode(held, threes=threes_of(ROW)), held.clone())
    with pytest.raises(CodedError, match="for a row of 112"):
        decode(encode(held), random_bytes(112, 0))


def test_damaged_messages_raise():
    """Cut, with bits flipped, or made up: an error, and memory around the row stays as it was."""
    generator = random.Random(0)
    held, threes = random_bytes(ROW, 0), threes_of(ROW)
    row = changed(held, 0.3, 3, 1)
    sound = [encode(row, held=held), encode(row), encode(row, threes=threes)]
    memory = torch.full((3 * ROW,), 7, dtype=torch.uint8)
    for _ in range(DAMAGES):
        message = generator.choice(sound).clone()
        damage = generator.randrange(4)
        if damage == 0:
            message = message[: generator.randrange(len(message))]
        elif damage == 1:
            message[generator.randrange(len(message))] ^= 1 << generator.randrange(8)
        elif damage == 2:  # any header, with a checksum that is right
            header = message[: ITEM * (FRAMES + 1)].numpy().view(NUMBER)
            header[generator.randrange(1, FRAMES + 1)] = generator.choice(
                [0, 1, 2, ROW, len(message), 2**31, 2**32 - 1]
            )
            header[0] = coded_message._checksum(header)
        else:
            message = torch.randint(0, 256, (generator.randrange(200),), dtype=torch.uint8)
        target = memory[ROW : 2 * ROW].copy_(held)
        try:
            decode(message, target, holds=True, threes=threes)
        except CodedError:
            pass
        else:  # a header that is made up can only be a valid one; some bits mean nothing
            assert damage == 2 or torch.equal(target, row)
        assert (memory[:ROW] == 7).all() and (memory[2 * ROW :] == 7).all()
