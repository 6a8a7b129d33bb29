"""The compiled reader of lines against json: the same texts, and none where json has none."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_zpp.preprocess import native as module
from megatron_zpp.preprocess.native import JsonReader, native
from tests.megatron_zpp.preprocess.runs import run, texts_of

KEYS = ("text", "é")
TEXTS = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)
PIECES = [*'{}[]":,\\ \t\r01-.eEu', "\\ud83d", "\\ude00", '"é":"c"']
DAMAGE = st.lists(st.sampled_from(PIECES), max_size=3)
OBJECTS = st.dictionaries(st.sampled_from(KEYS) | TEXTS, VALUES)
ODD = [
    "", " ", "null", "[]", '"text"', "{", "}", "{}", '{"text"', '{"text": "a"', '{"text": "a"}',
    '{"text": "a", "é": "b",}', '{"text": "a" "é": "b"}', "{'text': 'a', 'é': 'b'}",
    '{"text": "a", "é": "b"}x', '{"text": "a", "é": "b\t"}', '{"text": "a", "é": "b\\',
    '{"text": "a", "é": "\\ud800"}', '{"text": "a", "é": "\\udc00"}', '{"text": "a", "é": "\\x"}',
    '{"text": "a", "é": "\\ud800\\ud800"}', '{"text": "a", "é": "\\u12g4"}',
    '{"text": 1, "é": "b"}',
    '{"text": "a", "é": "b", "n": 01}', '{"text": "a", "é": "b", "n": 1.}',
    '{"text": "a", "é": "b", "n": -}', '{"text": "a", "é": "b", "n": nul}',
    '{"text": "a", "é": "b", "n": [1, {"x": [}]}', '{"text": "a", "é": "b", "n": [1,]}',
    '{"text": "a", "é": ["b"]}', '{"te\\u0078t": "a", "é": "b"}',
]  # fmt: skip


@pytest.fixture(scope="module")
def reader() -> JsonReader:
    built = native()
    if built is None:
        pytest.skip("csrc/ is not built here: make setup builds it where there is a compiler")
    return built


def as_json_reads(line: bytes) -> tuple[list[str], ...] | None:
    """The texts of a line, or None where json or a key has none."""
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    texts = [value.get(key) if isinstance(value, dict) else None for key in KEYS]
    return tuple([text] for text in texts) if all(isinstance(t, str) for t in texts) else None


@settings(max_examples=300, deadline=None)
@given(objects=st.lists(OBJECTS, max_size=4), ascii_only=st.booleans(), indent=st.booleans())
def test_what_json_writes_is_read_as_json_reads_it(
    reader: JsonReader, objects: list[dict], ascii_only: bool, indent: bool
) -> None:
    separators = ("\t,\r", " : ") if indent else None
    lines = [json.dumps(one, ensure_ascii=ascii_only, separators=separators) for one in objects]
    data = "".join(line + "\n" for line in lines).encode()
    found = list(reader.lines(data, KEYS))
    assert len(found) == len(lines)
    for line, (kept, texts) in zip(lines, found, strict=True):
        expected = as_json_reads(line.encode())
        strange = any(word in line for word in ("NaN", "Infinity"))
        assert texts == expected or (texts is None and (strange or "\\u" in line))
        assert kept == (b"" if texts is not None else line.encode())


@settings(max_examples=500, deadline=None)
@given(more=OBJECTS, place=st.integers(0, 99), removed=st.integers(0, 3), put=DAMAGE)
@example(more={}, place=10, removed=0, put=["a" * 23])
def test_it_takes_no_liberties_with_a_damaged_line(
    reader: JsonReader, more: dict, place: int, removed: int, put: list[str]
) -> None:
    line = json.dumps({"text": "a\n", "é": "b", **more}, ensure_ascii=False)
    data = (line[:place] + "".join(put) + line[place + removed :]).encode()
    ((kept, texts),) = reader.lines(data, KEYS)
    assert texts in (None, as_json_reads(data))
    assert kept == (data if texts is None else b"")


def test_every_escape(reader: JsonReader) -> None:
    data = rb'{"text": "\ud83d\ude00\u00e9\u20AC\u0041\/\b\f\n\r\t\"\\", "\xc3\xa9": ""}'
    data = data.replace(rb"\xc3\xa9", "é".encode())
    expected = (["\U0001f600é\u20acA/\b\f\n\r\t\"\\"], [""])
    assert list(reader.lines(data, KEYS)) == [(b"", expected)]


@pytest.mark.parametrize("line", ODD)
def test_an_odd_line_is_left_to_json(reader: JsonReader, line: str) -> None:
    good = b'{"text": "x", "\xc3\xa9": "y"}'
    data = good + b"\n" + line.encode() + b"\n" + good
    assert list(reader.lines(data, KEYS)) == [
        (b"", (["x"], ["y"])), (line.encode(), None), (b"", (["x"], ["y"])),
    ]  # fmt: skip


def test_deep_and_long_values_and_many_lines(reader: JsonReader) -> None:
    deep = '{"text": "a", "é": "b", "n": ' + "[" * 5000 + "]" * 5000 + "}"
    digits = '{"text": "a", "é": "b", "n": ' + "1" * 5000 + "}"
    many = "".join(f'{{"text": "{n}", "é": "{"é" * (n % 9)}"}}\n' for n in range(10_000))
    found = list(reader.lines(f"{deep}\n{digits}\n{many}".encode(), KEYS))
    assert found[:2] == [(deep.encode(), None), (digits.encode(), None)]
    assert found[2:] == [(b"", ([str(n)], ["é" * (n % 9)])) for n in range(10_000)]


def test_without_a_library_it_says_so_and_json_does_the_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "\\u00e9"}\n\n{"text": "b"}\r\n')
    module.native.cache_clear()
    with caplog.at_level(logging.INFO):
        assert texts_of(run(source, tmp_path / "x")) == ["é", "b"]
    module.native.cache_clear()
    assert [record.getMessage() for record in caplog.records].count(
        "JSON is read by Python, which takes longer: csrc/ was not built here (no compiler, or not "
        "installed with pip or make setup)"
    ) == 1
