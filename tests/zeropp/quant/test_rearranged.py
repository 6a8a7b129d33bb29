"""Rearranged bytes: the kernels do what the functions in PyTorch define, also on hostile input."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zeropp.quant import rearranged
from zeropp.quant.rearranged import add_differences, differences, join_threes, spread_threes

ROOT = Path(__file__).resolve().parents[3]
SIZES = (0, 4, 16, 36, 1000, 4096)


def random_bytes(size: int, seed: int, top: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)


@pytest.fixture(params=["kernels", "PyTorch"])
def implementation(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(rearranged, "_library", lambda: None)
    elif rearranged._library() is None:
        pytest.skip("csrc/ was not built")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top", [1, 2, 3, 256])
def test_differences_are_those_of_the_definition(implementation, size, top):
    held, change = random_bytes(size, 0), random_bytes(size, 1, top)
    row = held + change - int(top > 2)
    message = differences(row, held)
    assert torch.equal(message, rearranged._differences(row, held))
    assert size // 4 <= len(message) <= size // 4 * 5
    arrived = held.clone()
    add_differences(message, arrived)
    assert torch.equal(arrived, row)


def test_differences_in_words(implementation):
    """Two bytes one more, one less, seven more: symbols 1, 2 and 3, and the 7."""
    held = torch.zeros(8, dtype=torch.uint8)
    row = torch.tensor([1, 0, 0, 255, 0, 7, 1, 0], dtype=torch.uint8)
    first, second = 1 | 0 << 2 | 0 << 4 | 1 << 6, 0 | 2 << 2 | 3 << 4 | 0 << 6
    assert differences(row, held).tolist() == [first, second, 7]


def test_another_number_of_differences_is_refused(implementation):
    held, row = random_bytes(64, 0), random_bytes(64, 1)
    message, arrived = differences(row, held), held.clone()
    for wrong in (message[:-1], torch.cat((message, message[:1])), message[:10]):
        with pytest.raises(ValueError, match="differences"):
            add_differences(wrong, arrived)
        assert torch.equal(arrived, held)


@pytest.mark.parametrize("count", [0, 1, 8, 333])
def test_codes_of_three_bits_two_to_a_byte(implementation, count):
    threes = random_bytes(3 * count, 0)
    fours = spread_threes(threes)
    assert torch.equal(fours, rearranged._spread_threes(threes))
    word = sum(int(byte) << 8 * i for i, byte in enumerate(threes[:3]))
    assert fours[:4].tolist() == [word >> 6 * i & 63 for i in range(4 * bool(count))]
    joined = torch.empty_like(threes)
    join_threes(fours, joined)
    assert torch.equal(joined, threes)


def test_kernels_stay_inside_their_memory(tmp_path):
    """Under AddressSanitizer: 100,000 rows and messages of any bytes, right and wrong."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    program = tmp_path / "fuzz"
    sources = [ROOT / "csrc/messages/cpu.cpp", Path(__file__).parent / "fuzz_messages.cpp"]
    flags = "-std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    built = subprocess.run(
        [compiler, *flags.split(), *map(str, sources), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    if "sanitize" in built.stderr or "asan" in built.stderr:
        pytest.skip("no AddressSanitizer here")
    assert built.returncode == 0, built.stderr
    ended = subprocess.run([str(program)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
