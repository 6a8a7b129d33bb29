"""Real text without files or a tokenizer: Python's standard library, byte by byte."""

import sysconfig
from pathlib import Path

import numpy as np

NUM_BYTES = 256  # ids


class ByteText:
    """`size` samples of the first bytes of the standard library, shuffled; ids are bytes."""

    def __init__(self, size: int, seq_length: int) -> None:
        content = _beginning(size * (seq_length + 1))
        self._samples = np.frombuffer(content, dtype=np.uint8).reshape(size, seq_length + 1)
        self._order = np.random.default_rng(0).permutation(size)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1])."""
        return {"tokens": self._samples[self._order[index]].astype(np.int64)}


def _beginning(num_bytes: int) -> bytes:
    """The first bytes of the modules at the top, by name, from the beginning again if too few."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return (content * -(-num_bytes // len(content)))[:num_bytes]
