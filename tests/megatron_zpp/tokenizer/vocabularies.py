"""Small vocabularies and texts that the tests of tokenizers share."""

from pathlib import Path

import tokenizers
from hypothesis import strategies as st

from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT

TEXTS = [
    "def area(width, height):\n    return width * height\n\n\n",
    "The widths of the areas weren't returned; they'll be higher.  Höhe × Breite = 12345.\n",
    "for word in words:\n        if word.strip():\n            print(word, len(word))\n",
] * 30
ANY_TEXT = st.text(
    st.one_of(
        st.sampled_from(" \n\t\r'\u00a0\u3000\x1cabdehlrstw_=(12.,é中🙂\u0301<|>"),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=60,
)


def train_bpe(folder: Path) -> Path:
    """Put vocab.json, merges.txt and tokenizer.json of 400 tokens into `folder`."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        TEXTS, vocab_size=400, special_tokens=[END_OF_DOCUMENT], show_progress=False
    )
    trained.save_model(str(folder))
    trained.save(str(folder / "tokenizer.json"))
    return folder


def gpt2_of(folder: Path, **fields: int) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "vocab.json"),
            merge_file=str(folder / "merges.txt"),
            **fields,
        )
    )
