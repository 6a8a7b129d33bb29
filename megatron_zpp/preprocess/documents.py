"""The texts of a chunk, document by document; what cannot be read is named with file and line."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson

from megatron_zpp.preprocess.chunks import NEWLINE, Chunk
from zeropp.errors import InputError

SHOWN = 60  # characters of a bad line
BLANK = None
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The texts of each key; more than one where the value is a list of texts."""

    where: str
    texts: tuple[list[str], ...]


def documents(chunk: Chunk, keys: Sequence[str]) -> Iterator[Document | InputError | None]:
    """Each document, or what is wrong with it, or None for a blank line."""
    if chunk.is_whole:
        yield _attempt(lambda: _whole(chunk))
    elif chunk.rows:
        for number, row in enumerate(chunk.rows, start=chunk.first):
            yield _attempt(_row, row, keys, f"{chunk.path}, row {number}")
    else:
        for number, line in enumerate(_lines(chunk.content()), start=chunk.first):
            yield _attempt(_line, line, keys, f"{chunk.path}, line {number}")


def _attempt(read: Callable[..., T], *arguments: Any) -> T | InputError:
    try:
        return read(*arguments)
    except InputError as error:
        return error


def _lines(data: bytes) -> Iterator[memoryview]:
    """Each line where it stands, without its end."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE).tolist()
    if not data.endswith(b"\n"):
        ends.append(len(data))
    view, start = memoryview(data), 0
    for end in ends:
        yield view[start:end]
        start = end + 1


def _whole(chunk: Chunk) -> Document:
    where = f"{chunk.path}"
    return Document(where=where, texts=([_decoded(chunk.data, where)],))


def _row(row: Sequence[Any], keys: Sequence[str], where: str) -> Document:
    texts = tuple(_texts(value, key, where) for key, value in zip(keys, row, strict=True))
    return Document(where=where, texts=texts)


def _line(line: memoryview, keys: Sequence[str], where: str) -> Document | None:
    try:
        document, is_judged = orjson.loads(line), False
    except orjson.JSONDecodeError:
        content = bytes(line)
        if not content or content.isspace():
            return BLANK
        document, is_judged = _judged(content, where), True
    if not isinstance(document, dict):
        raise InputError(f"{where}: expected a JSON object, got {_shortened(document)}")
    for key in keys:
        if key not in document:
            found = ", ".join(map(repr, document)) or "none"
            raise InputError(f"{where}: no key {key!r} (its keys: {found}); see --json-keys")
    texts = tuple(_texts(document[key], key, where) for key in keys)
    if is_judged:
        _check_characters(texts, where)
    return Document(where=where, texts=texts)


def _judged(line: bytes, where: str) -> Any:
    """The value of a line that orjson refuses: json allows NaN, or says what is wrong."""
    text = _decoded(line, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}): {text[:SHOWN].rstrip()}") from error


def _texts(value: Any, key: str, where: str) -> list[str]:
    if isinstance(value, bytes):
        value = _decoded(value, where)
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{where}: {key!r} holds {_shortened(value)}, expected a string")
    return texts


def _check_characters(texts: Sequence[list[str]], where: str) -> None:
    """json reads half a character, which orjson refuses; no tokenizer has an id for it."""
    for text in chain.from_iterable(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: half of a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}"
            ) from error


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error.reason}, byte {error.start})") from error


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
