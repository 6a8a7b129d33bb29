"""Preprocessing in this process, and the documents that came of it."""

from pathlib import Path

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.preprocess import PreprocessConfig, preprocess
from megatron_zpp.settings.config import TokenizerConfig

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")


def run(source: Path, prefix: Path, tokenizer: TokenizerConfig = BYTES, **flags: object) -> Path:
    """Preprocess; returns the prefix of the first dataset."""
    config = PreprocessConfig(
        **{"input": str(source), "output_prefix": str(prefix), "workers": 1, **flags}
    )
    preprocess(config, tokenizer)
    return Path(config.prefixes[0])


def documents_of(prefix: Path) -> list[list[list[int]]]:
    """Each document's sequences of ids."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_index.tolist()
    return [
        [dataset.get(number).tolist() for number in range(*pair)]
        for pair in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def texts_of(prefix: Path) -> list[str]:
    """The documents of a dataset of bytes, their sequences joined by |."""
    return [
        "|".join(bytes(ids).decode() for ids in sequences) for sequences in documents_of(prefix)
    ]
