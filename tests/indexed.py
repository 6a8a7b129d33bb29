"""Small datasets in Megatron's format, written for a test."""

from pathlib import Path

from megatron_zpp.data.indexed_dataset import write_dataset


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 100) -> str:
    """Write documents of sequences of token ids; returns the prefix."""
    write_dataset(prefix, vocab_size, documents)
    return str(prefix)
