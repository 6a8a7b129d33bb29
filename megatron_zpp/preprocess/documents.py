"""Parse the documents of a chunk; errors name the file and the line."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson

from megatron_zpp.preprocess.chunks import NEWLINE, Chunk
from zeropp.errors import InputError

MAX_SHOWN = 60  # characters of an invalid line that an error message shows
BLANK = None
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The texts of one document, for each key; several if the value is a list of strings.

    `location` is the file and the line or row, for error messages.
    """

    location: str
    texts: tuple[list[str], ...]


def parse_documents(chunk: Chunk, keys: Sequence[str]) -> Iterator[Document | InputError | None]:
    """Yield each document, or the InputError that it causes, or None for a blank line."""
    if chunk.is_whole:
        location = f"{chunk.path}"
        yield _value_or_error(
            lambda: Document(location=location, texts=([_decode(chunk.data, location)],))
        )
    elif chunk.rows:
        for number, row in enumerate(chunk.rows, start=chunk.first):
            yield _value_or_error(_parse_row, row, keys, f"{chunk.path}, row {number}")
    else:
        for number, line in enumerate(_split_lines(chunk.content()), start=chunk.first):
            yield _value_or_error(_parse_line, line, keys, f"{chunk.path}, line {number}")


def _value_or_error(parse: Callable[..., T], *arguments: Any) -> T | InputError:
    try:
        return parse(*arguments)
    except InputError as error:
        return error


def _split_lines(data: bytes) -> Iterator[memoryview]:
    """Yield each line without its newline, as a view of `data`."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE).tolist()
    if not data.endswith(b"\n"):
        ends.append(len(data))
    view, start = memoryview(data), 0
    for end in ends:
        yield view[start:end]
        start = end + 1


def _parse_row(row: Sequence[Any], keys: Sequence[str], location: str) -> Document:
    texts = tuple(_texts(value, key, location) for key, value in zip(keys, row, strict=True))
    return Document(location=location, texts=texts)


def _parse_line(line: memoryview, keys: Sequence[str], location: str) -> Document | None:
    is_strict = True
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        content = bytes(line)
        if not content or content.isspace():
            return BLANK
        value = _parse_leniently(content, location)
        is_strict = False
    if not isinstance(value, dict):
        raise InputError(f"{location}: expected a JSON object, got {_shorten(value)}")
    for key in keys:
        if key not in value:
            names = ", ".join(map(repr, value)) or "none"
            raise InputError(f"{location}: no key {key!r} (its keys: {names}); see --json-keys")
    texts = tuple(_texts(value[key], key, location) for key in keys)
    if not is_strict:
        _check_characters(texts, location)
    return Document(location=location, texts=texts)


def _parse_leniently(line: bytes, location: str) -> Any:
    """Parse a line that orjson rejects with `json`, which accepts NaN and names the error."""
    text = _decode(line, location)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: not JSON ({error}): {text[:MAX_SHOWN].rstrip()}") from error


def _texts(value: Any, key: str, location: str) -> list[str]:
    if isinstance(value, bytes):
        value = _decode(value, location)
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{location}: {key!r} holds {_shorten(value)}, expected a string")
    return texts


def _check_characters(texts: Sequence[list[str]], location: str) -> None:
    """Raise InputError for a lone surrogate, which `json` accepts and no tokenizer can encode."""
    for text in chain.from_iterable(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{location}: half of a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}"
            ) from error


def _decode(line: bytes, location: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{location}: not UTF-8 ({error.reason}, byte {error.start})") from error


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " ..."
