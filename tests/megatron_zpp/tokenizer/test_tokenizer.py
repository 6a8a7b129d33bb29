"""The other tokenizers: text that comes back, ends of documents, and files that are no good."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import given

from megatron_zpp.settings.arguments import parse
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT, load_package
from tests.megatron_zpp.tokenizer.vocabularies import ANY_TEXT, TEXTS, gpt2_of
from zeropp.errors import InputError


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with usual.model and ends.model, which has no begin or end of sentence."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    for name, special in (("usual", {}), ("bare", {"bos_id": -1, "eos_id": -1})):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_prefix=str(folder / name),
            vocab_size=120,
            model_type="bpe",
            minloglevel=2,
            **special,
        )
    return folder


def hf_of(path: Path) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    )


def sentencepiece_of(path: Path, kind: str, extra: int = 0) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(path), vocab_extra_ids=extra)
    )


def test_hugging_face_agrees_with_the_two_files(bpe: Path, gpt2: Tokenizer) -> None:
    for path in (bpe, bpe / "tokenizer.json"):
        tokenizer = hf_of(path)
        assert [tokenizer.encode(text) for text in TEXTS[:3]] == [
            gpt2.encode(text) for text in TEXTS[:3]
        ]
        assert (tokenizer.eod, tokenizer.vocab_size) == (gpt2.eod, gpt2.vocab_size)
        assert tokenizer.encode_batch(TEXTS[:3]) == gpt2.encode_batch(TEXTS[:3])
        assert tokenizer.encode(f"a{END_OF_DOCUMENT}")[1:] == [tokenizer.eod]
        assert tokenizer.decode([tokenizer.eod]) == END_OF_DOCUMENT
        assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]


@pytest.mark.parametrize(
    ("kind", "flag"),
    [("PretrainedFromHF", "--tokenizer-name-or-path"), ("TokenizerFromFile", "--tokenizer-file")],
)
def test_hugging_face_under_the_names_of_others(kind: str, flag: str, bpe: Path) -> None:
    config = parse(["--tokenizer-type", kind, flag, str(bpe / "tokenizer.json")], 1)
    assert build_tokenizer(config.tokenizer).fingerprint == hf_of(bpe).fingerprint
    missing = parse(["--tokenizer-type", kind, flag, "bigscience/bloom"], 1)
    with pytest.raises(InputError, match="bloom: No such file; nothing is downloaded"):
        build_tokenizer(missing.tokenizer)


def test_hugging_face_cuts_nothing_and_opens_texts_once(bpe: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    end = model.token_to_id(END_OF_DOCUMENT)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT} $A", special_tokens=[(END_OF_DOCUMENT, end)]
    )
    model.enable_truncation(5)
    model.enable_padding(length=1000)
    model.save(str(tmp_path / "tokenizer.json"))
    ids, opens = hf_of(bpe).encode(TEXTS[0]), hf_of(tmp_path)
    assert hf_of(bpe).prompt(TEXTS[0]) == opens.encode_part(TEXTS[0]) == ids
    assert opens.encode_batch([TEXTS[0]]) == [ids]
    assert opens.encode(TEXTS[0]) == opens.encode_flat([TEXTS[0]])[0].tolist() == [end, *ids]
    assert opens.prompt("") == opens.prompt(END_OF_DOCUMENT) == [end]
    assert opens.prompt(TEXTS[0]) == opens.prompt(END_OF_DOCUMENT + TEXTS[0]) == [end, *ids]
    assert opens.example([1, 2], [3]) == ([end, 1, 2, 3, end], 3)
    assert opens.example([], [end, 3, end]) == ([end, 3, end], 1)
    config = parse(
        ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-hf-no-include-special-tokens",
         "--tokenizer-model", str(tmp_path)], 1
    ).tokenizer  # fmt: skip
    plain = build_tokenizer(config)
    assert plain.encode(TEXTS[0]) == plain.prompt(TEXTS[0]) == ids
    assert plain.fingerprint == opens.fingerprint


ADDED = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=True)
FOLDERS = {
    "begin of sentence, as Llama 3's": (("<bos>", "</s>"), "<bos> $A", {
        "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": "</s>"},
    }),
    "around a text": (("<bos>", "</s>"), "<bos> $A </s>", {
        "tokenizer_config.json": {"eos_token": ADDED | {"__type": "AddedToken", "content": "</s>"},
            "add_bos_token": False,},
    }),
    "nothing put before, as Qwen's": (("</s>", "<im>"), None, {
        "tokenizer_config.json": {"eos_token": "<im>", "tokenizer_class": "Qwen2Tokenizer"},
        "config.json": {"model_type": "qwen2"},
    }),
    "only in the settings": (("</s>",), None, {
        "tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {
            "401": ADDED | {"content": "<im>", "lstrip": True, "rstrip": True},
            "402": ADDED | {"content": "Höhe", "normalized": True, "special": False},
        }},
    }),
    "only in files of their own": (("</s>",), None, {
        "added_tokens.json": {"<im>": 401, "WORD": 402},
        "special_tokens_map.json": {"eos_token": "<im>", "additional_special_tokens": ["<x>"]},
    }),
    "not found in texts": (("<bos>", "</s>"), "<bos> $A", {
        "tokenizer_config.json": {"eos_token": "</s>", "split_special_tokens": True},
    }),
    "sentencepiece": ((), None, {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
        "config.json": {"model_type": "llama"},
    }),
}  # fmt: skip
PROBES = [
    "<bos>a  <im> word</s>\n<x>", "<im>user\nhi<im> WORD, Höhe HÖHE <|endoftext|>", " two  blanks ",
    "",
]  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_hugging_face_is_transformers(name, bpe, sentences, tmp_path):
    special, around, files = FOLDERS[name]
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    if special:
        model = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
        model.add_special_tokens([*special])
        if around:
            ids = [(token, model.token_to_id(token)) for token in special]
            model.post_processor = tokenizers.processors.TemplateProcessing(
                single=around, special_tokens=ids
            )
        model.save(str(tmp_path / "tokenizer.json"))
    else:
        shutil.copy(sentences / "usual.model", tmp_path / "tokenizer.model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = hf_of(tmp_path)
    expected = [theirs(text).input_ids for text in PROBES]
    assert [ours.encode(text) for text in PROBES] == expected
    parts = [theirs(text, add_special_tokens=False).input_ids for text in PROBES]
    assert ours.encode_batch(PROBES) == parts
    assert (ours.eod, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    assert not special or ours.fingerprint != hf_of(bpe).fingerprint


def test_hugging_face_end_of_document(bpe: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    model.add_special_tokens(["</s>", "<stop>"])
    path, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    model.save(str(path))
    with pytest.raises(InputError, match=r"which token ends .*<\|endoftext\|> and </s>.*beside"):
        hf_of(path)
    for end in ("<stop>", {"__type": "AddedToken", "content": "<stop>"}):
        beside.write_text(json.dumps({"eos_token": end}))
        assert hf_of(path).eod == model.token_to_id("<stop>")
    beside.write_text('{"eos_token": "<none>"}')  # transformers adds it
    assert (hf_of(path).eod, hf_of(path).vocab_size) == (356, 357)
    beside.write_text("{,}")
    with pytest.raises(InputError, match=r"transformers cannot read it .*line 1 column 2"):
        hf_of(path)


@pytest.mark.parametrize("kind", ["GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_is_the_library(sentences: Path, kind: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(sentences / "usual.model"))
    tokenizer = sentencepiece_of(sentences / "usual.model", kind)
    begin = [model.bos_id()] if kind == "Llama2Tokenizer" else []
    assert tokenizer.encode("the width of words") == begin + model.encode("the width of words")
    assert tokenizer.decode(tokenizer.encode("the width of words")) == "the width of words"
    assert (tokenizer.eod, tokenizer.vocab_size) == (model.eos_id(), 120)
    assert (tokenizer.name, tokenizer.eod in tokenizer.encode("a</s>b")) == (kind, False)


def test_sentencepiece_has_megatrons_layout(sentences: Path) -> None:
    """Four tokens of Megatron after the pieces, <PAD> where there is none, then the extra ids."""
    tokenizer = sentencepiece_of(sentences / "usual.model", "SentencePieceTokenizer", extra=3)
    assert tokenizer.eod == 120 + 2
    assert tokenizer.vocab_size == 120 + 4 + 1 + 3
    assert tokenizer.decode(range(120, 128)) == (
        "<CLS><SEP><EOD><MASK><PAD><extra_id_0><extra_id_1><extra_id_2>"
    )
    bare = sentencepiece_of(sentences / "bare.model", "SentencePieceTokenizer")
    assert bare.decode(range(124, bare.vocab_size)) == "<PAD><BOS><EOS>"


@given(text=ANY_TEXT)
def test_byte_level(text: str) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)
    assert tokenizer.decode([104, 105, 256, 0xC3, 0xA9, 0xFF]) == f"hi{END_OF_DOCUMENT}é\ufffd"


def test_null() -> None:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)
    tokenizer = build_tokenizer(config)
    assert tokenizer.encode(" 3 14\n15 99 ") == [3, 14, 15, 99]
    assert tokenizer.decode([3, 14, 99]) == "3 14 99"
    assert (tokenizer.eod, tokenizer.vocab_size) == (99, 100)
    with_other_end = build_tokenizer(replace(config, null_tokenizer_eod_id=7))
    assert with_other_end.eod == 7 and with_other_end.fingerprint != tokenizer.fingerprint
    for text, message in (("3 x", "not 'x'"), ("-1", "not '-1'"), ("100", "id 100 is outside")):
        with pytest.raises(InputError, match=message):
            tokenizer.encode(text)


def test_what_a_tokenizer_lacks_is_named(sentences: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("GPTSentencePieceTokenizer", "Llama2Tokenizer"):
        with pytest.raises(InputError, match=r"bare\.model: has no end of sentence"):
            sentencepiece_of(sentences / "bare.model", kind)
    with pytest.raises(InputError, match="X needs the package no_such: pip install no_such"):
        load_package("no_such", "X")
    caplog.set_level(logging.INFO, logger="megatron_zpp")
    build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer", merge_file="m.txt"))
    said = "--merge-file m.txt has no effect with --tokenizer-type ByteLevelTokenizer"
    assert said in caplog.text


def test_extra_ids_come_last(gpt2: Tokenizer, bpe: Path) -> None:
    tokenizer = gpt2_of(bpe, vocab_extra_ids=2)
    assert tokenizer.vocab_size == gpt2.vocab_size + 2
    assert tokenizer.decode([gpt2.vocab_size + 1]) == "<extra_id_1>"
    assert tokenizer.fingerprint == gpt2.fingerprint
    with pytest.raises(InputError, match=f"id {gpt2.vocab_size + 2} is outside"):
        tokenizer.decode([gpt2.vocab_size + 2])


def test_fingerprints_tell_tokenizers_apart(bpe: Path, sentences: Path) -> None:
    model = sentences / "usual.model"
    tokenizers = [
        gpt2_of(bpe),
        hf_of(bpe),
        sentencepiece_of(model, "GPTSentencePieceTokenizer"),
        sentencepiece_of(model, "Llama2Tokenizer"),
        sentencepiece_of(model, "SentencePieceTokenizer"),
        build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer")),
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)),
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=101)),
    ]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == len(tokenizers)
    untyped = TokenizerConfig(vocab_file=f"{bpe}/vocab.json", merge_file=f"{bpe}/merges.txt")
    assert build_tokenizer(untyped).fingerprint == tokenizers[0].fingerprint
    assert gpt2_of(bpe).fingerprint == tokenizers[0].fingerprint
