"""Each type of tokenizer, written to a folder: transformers makes the same ids of a text."""

import json
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megatron_zpp.interchange.tokenizer_files import SENTENCEPIECE, write_tokenizer
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import build_tokenizer, tokenizer_config_of
from tests.megatron_zpp.tokenizer.vocabularies import TEXTS, train_bpe

PROBES = [
    *TEXTS[:2], " two  blanks ", "Höhe × 中🙂\n\ttab", "it's\u00a0a test's end.", "a", "",
]  # fmt: skip
KINDS = {
    "two files": dict(vocab_file="vocab.json", merge_file="merges.txt"),
    "two files, further ids": dict(
        tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json", merge_file="merges.txt",
        vocab_extra_ids=3,
    ),
    "tokenizer.json": dict(tokenizer_type="HFTokenizer", tokenizer_model="tokenizer.json"),
    "tokenizer.json, further ids": dict(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=".", vocab_extra_ids=2
    ),
    "bytes": dict(tokenizer_type="ByteLevelTokenizer", vocab_extra_ids=1),
    **{
        f"{kind} of {model}": dict(
            tokenizer_type=kind, tokenizer_model=f"{model}.model", vocab_extra_ids=extra
        )
        for model in ("bpe", "unigram", "bytes", "bare")
        for kind, extra in (
            ("SentencePieceTokenizer", 2), ("GPTSentencePieceTokenizer", 0), ("Llama2Tokenizer", 0),
        )
        if model != "bare" or kind == "SentencePieceTokenizer"
    },
}  # fmt: skip
MODELS = {
    "bpe": dict(model_type="bpe", vocab_size=120),
    "unigram": dict(model_type="unigram", vocab_size=58),
    # As Llama's: unknown characters are bytes, and no blank is removed.
    "bytes": dict(
        model_type="bpe", vocab_size=400, byte_fallback=True, remove_extra_whitespaces=False,
        normalization_rule_name="identity", hard_vocab_limit=False,
    ),
    "bare": dict(model_type="bpe", vocab_size=120, bos_id=-1, eos_id=-1),
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = train_bpe(tmp_path_factory.mktemp("vocabularies"))
    for name, settings in MODELS.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(folder / name), minloglevel=2,
            **settings,
        )  # fmt: skip
    return folder


def config_of(fields: dict, folder: Path) -> TokenizerConfig:
    paths = ("vocab_file", "merge_file", "tokenizer_model")
    return TokenizerConfig(
        **{name: str(folder / value) if name in paths else value for name, value in fields.items()}
    )


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_transformers_makes_the_same_ids(fields: dict, vocabularies: Path, tmp_path: Path) -> None:
    config = config_of(fields, vocabularies)
    ours = build_tokenizer(config)
    written = write_tokenizer(config, ours, tmp_path)
    assert set(written) == {path.name for path in tmp_path.iterdir()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in PROBES:
        assert theirs(text)["input_ids"] == ours.encode(text), text
    ids = ours.encode(TEXTS[1])  # without unknown characters, which SentencePiece shows as a sign
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.eod)
    assert {number: theirs.decode([number]) for number in ours.reserved} == ours.reserved
    again = build_tokenizer(tokenizer_config_of(tmp_path))  # imported again
    assert again.eod == ours.eod
    for text in PROBES:
        assert again.prompt(text) == ours.encode(text), text


def test_a_model_that_a_tokenizer_json_cannot_be_is_not_written(vocabularies, tmp_path):
    """One of words, here; transformers would read its file and make other ids."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "words"), minloglevel=2,
        vocab_size=20, model_type="word", hard_vocab_limit=False,
    )  # fmt: skip
    fields = dict(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model="words.model")
    config = config_of(fields, tmp_path)
    target = tmp_path / "target"
    target.mkdir()
    assert write_tokenizer(config, build_tokenizer(config), target) == []
    assert not (target / SENTENCEPIECE).exists()
