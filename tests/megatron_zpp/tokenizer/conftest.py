"""A byte-pair vocabulary, trained once for all tests of tokenizers."""

from pathlib import Path

import pytest

from megatron_zpp.tokenizer import Tokenizer
from tests.megatron_zpp.tokenizer.vocabularies import gpt2_of, train_bpe


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer.json."""
    return train_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def gpt2(bpe: Path) -> Tokenizer:
    """The GPT2BPETokenizer of that folder."""
    return gpt2_of(bpe)
