"""A dataset of real text that every machine has: the source code of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset


class StandardLibrary(Dataset):
    """Samples of consecutive bytes: inputs of shape (length,), and labels shifted by one byte."""

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
