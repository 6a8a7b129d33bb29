"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset


class StandardLibrary(Dataset):
    """Pieces of `length` bytes and the byte after each: samples of (length,) inputs and labels."""

    def __init__(self, length: int, most_bytes: int = 2_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text[:most_bytes]), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.bytes[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]
