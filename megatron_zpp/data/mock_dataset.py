"""Random samples for benchmarks, without files."""

import numpy as np


class MockDataset:
    """`size` samples of random token ids below `vocab_size`.

    A sample depends on `seed`, which includes the split, and on its index only.
    """

    def __init__(self, size: int, seq_length: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self.size, self.seq_length, self.vocab_size = size, seq_length, vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1])."""
        random = np.random.default_rng((*self.seed, index))
        return {"tokens": random.integers(self.vocab_size, size=self.seq_length + 1)}
