"""GPT2BPETokenizer: the ids of the published algorithm, and files that do not fit."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings

from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT
from megatron_zpp.tokenizer.gpt2_bpe import BLANKS, LONG_RUN, WORDS
from tests.megatron_zpp.tokenizer.vocabularies import ANY_TEXT, TEXTS, gpt2_of
from zeropp.errors import InputError

# GPT-2's published pattern; the tokenizer uses another that must cut alike.
GPT2_PATTERN = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


@cache
def gpt2_files(folder: Path) -> tuple[dict[str, int], dict[tuple[str, ...], int]]:
    """The vocabulary, and the place of each pair in merges.txt."""
    lines = (folder / "merges.txt").read_text().split("\n")[1:]
    pairs = [tuple(line.split(" ")) for line in lines if line]
    vocab = json.loads((folder / "vocab.json").read_text())
    return vocab, {pair: place for place, pair in enumerate(pairs)}


def gpt2_ids(folder: Path, text: str) -> list[int]:
    """GPT-2's algorithm as published: in each word join all of the earliest pair, until none is."""
    vocab, place = gpt2_files(folder)
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = sorted(set(range(256)) - set(shown))
    letter = {byte: chr(byte) for byte in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    ids = []
    for word in GPT2_PATTERN.findall(text):
        parts = [letter[byte] for byte in word.encode()]
        while True:
            pairs = set(zip(parts[:-1], parts[1:], strict=True))
            best = min(pairs, key=lambda pair: place.get(pair, len(place)), default=None)
            if best not in place:
                break
            joined, at = [], 0
            while at < len(parts):
                size = 2 if tuple(parts[at : at + 2]) == best else 1
                joined.append("".join(parts[at : at + size]))
                at += size
            parts = joined
        ids += [vocab[part] for part in parts]
    return ids


@settings(max_examples=300, deadline=None)
@given(text=ANY_TEXT)
def test_gpt2_ids_are_the_published_algorithms(bpe: Path, gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert ids == gpt2_ids(bpe, text)
    assert gpt2.decode(ids) == text


@settings(max_examples=300)
@given(text=ANY_TEXT)
def test_words_are_those_of_the_published_pattern(text: str) -> None:
    """Rust's `$` is Python's `\\Z`; apart from that the two engines read the pattern alike."""
    assert regex.findall(WORDS.replace("$", r"\Z"), text) == GPT2_PATTERN.findall(text)


def test_gpt2_ids_follow_the_vocabulary_in_any_order(bpe, gpt2, tmp_path):
    vocab, _ = gpt2_files(bpe)
    turned = {token: (7 * number + 3) % len(vocab) for token, number in vocab.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(turned))
    (tmp_path / "merges.txt").write_text((bpe / "merges.txt").read_text())
    other = gpt2_of(tmp_path)
    text = "".join(TEXTS[:3])
    assert gpt2.encode(text) == gpt2_ids(bpe, text) and len(gpt2.encode(text)) < len(text) / 2
    assert other.encode(text) == [(7 * token + 3) % len(vocab) for token in gpt2.encode(text)]
    assert other.decode(other.encode(text)) == text
    assert other.eod == turned[END_OF_DOCUMENT]
    assert other.fingerprint != gpt2.fingerprint


def test_gpt2_end_of_document(bpe: Path, gpt2: Tokenizer) -> None:
    vocab, _ = gpt2_files(bpe)
    assert gpt2.eod == vocab[END_OF_DOCUMENT]
    assert gpt2.vocab_size == len(vocab)
    assert gpt2.eod not in gpt2.encode(f"a{END_OF_DOCUMENT}b")
    assert gpt2.decode([*gpt2.encode("a"), gpt2.eod]) == f"a{END_OF_DOCUMENT}"


@pytest.mark.parametrize("after", ["", "word", "\tword"])
def test_long_blanks_are_cut_where_gpt2_cuts(gpt2: Tokenizer, after: str) -> None:
    text = "word" + "\n" * LONG_RUN + " " + after
    whole = gpt2._encoding.encode_ordinary(text)
    assert gpt2.encode(text) == [gpt2._id_of_rank[rank] for rank in whole]
    text = "\n" * 1_100_000 + after  # is no crash
    assert gpt2.decode(gpt2.encode(text)) == text


def test_blanks_are_those_of_the_pattern() -> None:
    """Python's white space and Unicode's differ by four control characters."""
    blank = regex.compile(r"\p{White_Space}")
    blank_character = regex.compile(BLANKS.pattern.split("{")[0])
    everything = "".join(map(chr, range(0x110000)))
    assert blank_character.findall(everything) == blank.findall(everything)
    assert r"\s" in WORDS


def without(token: str) -> Callable:
    return lambda vocab, lines: ({name: vocab[name] for name in vocab if name != token}, lines)


def with_line(number: int, line: str) -> Callable:
    return lambda vocab, lines: (vocab, [*lines[:number], line, *lines[number + 1 :]])


# What becomes of the vocabulary and of the lines of merges.txt, the first a title; and the error.
BROKEN = [
    (without(END_OF_DOCUMENT), r"vocab\.json: has no token <\|endoftext\|>"),
    (without("Ċ"), r"vocab\.json: has no token for 1 of the 256 bytes \(0x0a"),
    (lambda vocab, lines: without("".join(lines[1].split()))(vocab, lines),
     r"merges\.txt, line 2: .* is not in --vocab-file .*vocab\.json"),
    (lambda vocab, lines: (vocab | {"a": vocab["b"]}, lines),
     r"vocab\.json: two tokens have the same id"),
    (lambda vocab, lines: (vocab | {"a": "7"}, lines), r"vocab\.json: id of 'a' is '7'"),
    (lambda vocab, lines: (vocab, lines[: len(lines) // 2]),
     r"vocab\.json: \d+ tokens .* made by no line of .*merges\.txt"),
    (lambda vocab, lines: (vocab, [lines[0], *lines[:0:-1]]),
     r"merges\.txt, line \d+: .* is neither a byte nor made"),
    (lambda vocab, lines: with_line(2, lines[1])(vocab, lines),
     r"merges\.txt, line 3: makes .* again, after line 2"),
    (with_line(3, "a b x"), r"merges\.txt, line 4: expected two tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_gpt2_files_that_are_no_good(change, message: str, bpe: Path, tmp_path: Path) -> None:
    vocab = json.loads((bpe / "vocab.json").read_text())
    lines = (bpe / "merges.txt").read_text().split("\n")
    vocab, lines = change(vocab, lines)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(lines))
    with pytest.raises(InputError, match=message):
        gpt2_of(tmp_path)


def test_gpt2_files_that_are_no_text(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0,\n "b" 1}')
    (tmp_path / "merges.txt").write_text((bpe / "merges.txt").read_text())
    with pytest.raises(InputError, match=r"vocab\.json: not JSON \(line 2, column 6"):
        gpt2_of(tmp_path)
    (tmp_path / "vocab.json").write_text((bpe / "vocab.json").read_text())
    (tmp_path / "merges.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"merges\.txt: not UTF-8 text \(byte 0\)"):
        gpt2_of(tmp_path)
