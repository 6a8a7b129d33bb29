"""What the tests of several files compare with."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_zpp.tokenizer import Tokenizer
from tests.megatron_zpp.tokenizer.vocabularies import gpt2_of, train_bpe
from tests.megatron_zpp.train.training_runs import run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The log of one rank for some flags, which trains once however often it is asked for."""
    return functools.cache(lambda flags: run(1, flags, tmp_path_factory.mktemp("alone")))


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with vocab.json, merges.txt and tokenizer.json."""
    return train_bpe(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def gpt2(bpe: Path) -> Tokenizer:
    """The GPT2BPETokenizer of that folder."""
    return gpt2_of(bpe)
