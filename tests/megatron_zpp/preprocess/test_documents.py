"""Lines of JSON: texts as `json` reads them, errors of invalid lines, and where sentences end."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.preprocess.chunks import Chunk, InputPosition
from megatron_zpp.preprocess.documents import Document, parse_documents
from megatron_zpp.preprocess.sentences import split_sentences
from zeropp.errors import InputError

TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


def read(*lines: bytes) -> list[Document | InputError | None]:
    data = b"\n".join(lines) + b"\n"
    end = InputPosition(file=1)
    chunk = Chunk(
        path=Path("a.jsonl"), first=7, data=data, size=len(data), end=end, bytes_read=len(data)
    )
    return list(parse_documents(chunk, ["text"]))


@settings(max_examples=200, deadline=None)
@given(others=st.dictionaries(TEXTS, VALUES), text=TEXTS, ascii_only=st.booleans())
def test_the_text_is_the_one_that_was_written(others: dict, text: str, ascii_only: bool) -> None:
    line = json.dumps({**others, "text": text}, ensure_ascii=ascii_only).encode()
    assert [document.texts for document in read(line)] == [([text],)]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1" * 100, "1e999", "-0.0"])
def test_numbers_that_only_json_allows_are_no_mistake(number: str) -> None:
    (document,) = read(f'{{"n": {number}, "text": "a"}}'.encode())
    assert document.texts == (["a"],) and document.location == "a.jsonl, line 7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "a.jsonl, line 8: not JSON (Expecting ',' delimiter: line 1 column 13"),
        (b'{"text": "\\ud800"}', "a.jsonl, line 8: half of a surrogate pair, '\\ud800', at"),
        (b'{"text": "\xff"}', "a.jsonl, line 8: not UTF-8 (invalid start byte, byte 10)"),
        (b"[" * 100_000, "a.jsonl, line 8: not JSON (maximum recursion depth exceeded"),
        (b'["text"]', 'a.jsonl, line 8: expected a JSON object, got ["text"]'),
        (b'{"txt": "a"}', "a.jsonl, line 8: no key 'text' (its keys: 'txt'); see --json-keys"),
        (b'{"text": 1}', "a.jsonl, line 8: 'text' holds 1, expected a string"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(line: bytes, message: str) -> None:
    blank, wrong, right = read(b" ", line, b'{"text": "a"}')
    assert blank is None and right.texts == (["a"],)
    assert isinstance(wrong, InputError) and str(wrong).startswith(message)


@pytest.mark.parametrize(
    "expected",
    [
        ["One.", "Two!", "Three?", "Four"],
        ["Mr. Smith met Dr. J. R. Brown, e.g. at 3.5 km.", "He left."],
        ['"Stop!" he message.', '"Why?"', "(Nobody knew.)", "Then it was 5 p.m. and late."],
        ["See Fig. 3 of vol. 2.", "It was sold by Acme Inc.", "Nobody bought it."],
        ["so she message... and went on.", "1984 was next."],
        ["Élan.", "Über alles.", "So did I.", "We were two."],
        ["これは一つ。", "これは二つ。", "end"],
    ],
)
def test_sentences_end_where_a_reader_would_end_them(expected: list[str]) -> None:
    assert split_sentences(" ".join(expected), False) == expected


def test_an_empty_line_ends_a_sentence_and_newlines_can_be_kept() -> None:
    text = "A heading\n\nA sentence.\nAnother one. The last. \n"
    assert split_sentences(text, False) == ["A heading", "A sentence.", "Another one.", "The last."]
    assert split_sentences(text, True) == [
        "A heading\n\n", "A sentence.\n", "Another one.", "The last. \n"
    ]  # fmt: skip


@given(st.text(st.sampled_from("aB1 .!?\n\"'()。é")))
def test_nothing_but_white_space_is_lost(text: str) -> None:
    sentences = split_sentences(text, False)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentences)
