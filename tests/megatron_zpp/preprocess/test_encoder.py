"""Documents to tokens: sequences, what is left out, and the library that is compared first."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.preprocess import encoder
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT
from megatron_zpp.tokenizer.fast_gpt2 import FastGPT2
from tests.megatron_zpp.preprocess.runs import documents_of, run, texts_of
from tests.megatron_zpp.tokenizer.vocabularies import ANY_TEXT, TEXTS
from zeropp.errors import InputError

BAD_LINES = [
    b'{"text": "bad"',
    b'{"text": "\xff"}',
    b'{"title": "x"}',
    b'{"text": null}',
    b'{"text": "\\ud800"}',
]


@pytest.fixture(scope="module")
def fast(bpe: Path) -> FastGPT2:
    return FastGPT2(str(bpe / "vocab.json"), str(bpe / "merges.txt"))


def config_of(bpe: Path) -> TokenizerConfig:
    return TokenizerConfig(vocab_file=str(bpe / "vocab.json"), merge_file=str(bpe / "merges.txt"))


def test_lists_are_sequences_and_empty_documents_have_none(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    values = [["ab", "", "c"], "d", "", [], [""]]
    source.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    documents = documents_of(run(source, tmp_path / "x", append_eod=True))
    assert documents == [[[97, 98], [99, 256]], [[100, 256]], [], [], []]


def test_sentences_are_sequences(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "One here. Two?\nThree"}) + "\n")
    prefix = run(source, tmp_path / "x", split_sentences=True)
    assert prefix == tmp_path / "x_text_sentence"
    assert texts_of(prefix) == ["One here.|Two?|Three"]
    with_newlines = run(source, tmp_path / "y", split_sentences=True, keep_newlines=True)
    assert texts_of(with_newlines) == ["One here.|Two?\n|Three"]


def test_invalid_lines_are_counted_and_the_first_is_named(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a"}\n' + b"\n".join(BAD_LINES) + b'\n{"text": "b"}\n')
    assert texts_of(run(source, tmp_path / "x", skip_invalid=True)) == ["a", "b"]
    message = capsys.readouterr().out
    assert f"5 invalid documents skipped; the first: {source}, line 2: not JSON" in message


def test_what_the_tokenizer_refuses_is_invalid_for_all_keys(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    lines = [("1", "2"), ("3", "70000"), ("x", "4"), ("5", "6")]
    source.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in lines))
    null = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50257)
    run(source, tmp_path / "x", null, json_keys=("a", "b"), skip_invalid=True)
    assert "2 invalid documents skipped" in capsys.readouterr().out
    assert documents_of(tmp_path / "x_a_document") == [[[1]], [[5]]]
    assert documents_of(tmp_path / "x_b_document") == [[[2]], [[6]]]
    with pytest.raises(InputError, match=r"line 2: token id 70000 is outside the 50257 ids"):
        run(source, tmp_path / "y", null, json_keys=("a", "b"))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(ANY_TEXT, max_size=5))
def test_many_texts_at_once_are_each_text_alone(gpt2, fast, texts):
    alone = [gpt2.encode(text) for text in texts]
    for tokenizer in (gpt2, fast):
        ids, counts = tokenizer.encode_flat(texts)
        assert counts.tolist() == [len(text_ids) for text_ids in alone]
        assert ids.tolist() == [token for text_ids in alone for token in text_ids]


def test_a_name_of_a_special_token_is_ordinary_text(gpt2: Tokenizer, fast: FastGPT2) -> None:
    text = f"a {END_OF_DOCUMENT}{END_OF_DOCUMENT} b"
    for tokenizer in (gpt2, fast):
        ids = tokenizer.encode_flat([text])[0].tolist()
        assert gpt2.eod not in ids and ids == gpt2.encode(text)


def test_other_ids_of_the_faster_library_end_the_run(tmp_path, bpe, monkeypatch):
    def wrong(self: FastGPT2, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, counts = exact(self, texts)
        return ids ^ (ids == ids.max()), counts

    exact = FastGPT2.encode_flat
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    monkeypatch.setattr(encoder.FastGPT2, "encode_flat", wrong)
    for skip in (False, True):
        with pytest.raises(InputError, match=r"line 1 and what follows: fastokens makes other ids"):
            run(source, tmp_path / "x", config_of(bpe), bpe_library="fastokens", skip_invalid=skip)
    assert list(tmp_path.iterdir()) == [source]


def test_the_faster_library_is_for_gpt2_only(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match="fastokens needs GPT2BPETokenizer, not ByteLevel"):
        run(source, tmp_path / "x", bpe_library="fastokens")


DATA = Path(__file__).resolve().parents[2] / "data"
GPT2 = TokenizerConfig(
    vocab_file=str(DATA / "gpt2_part" / "vocab.json"),
    merge_file=str(DATA / "gpt2_part" / "merges.txt"),
)


@pytest.mark.parametrize("library", ["tiktoken", "fastokens"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_files_are_megatrons(tmp_path: Path, name: str, library: str) -> None:
    tokenizer = build_tokenizer(GPT2)
    source = tmp_path / "a.jsonl"
    with open(source, "w") as file:
        for sequences in documents_of(DATA / f"{name}_text_document"):
            assert all(ids[-1] == 50256 for ids in sequences)
            text = tokenizer.decode([token for ids in sequences for token in ids[:-1]])
            file.write(json.dumps({"text": text}) + "\n")
    prefix = run(source, tmp_path / "x", GPT2, append_eod=True, bpe_library=library)
    for end in ("bin", "idx"):
        expected = (DATA / f"{name}_text_document.{end}").read_bytes()
        assert prefix.with_name(f"{prefix.name}.{end}").read_bytes() == expected


def test_the_name_of_the_end_of_a_document_is_ordinary_text(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": f"{END_OF_DOCUMENT} a"}) + "\n")
    documents = documents_of(run(source, tmp_path / "x", GPT2, append_eod=True))
    assert documents == [[[27, 91, 437, 1659, 5239, 91, 29, 257, 50256]]]
