"""Small datasets in Megatron's format, written for a test."""

from pathlib import Path

from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 100) -> str:
    """Write documents of sequences of token ids; returns the prefix."""
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            for sequence in document:
                writer.add_item(sequence)
            writer.end_document()
    return str(prefix)
