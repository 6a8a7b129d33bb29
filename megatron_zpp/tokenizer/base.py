"""The interface of all tokenizers, and functions to read their files.

Ids run from 0 to vocab_size - 1. `eod` ends a document; its name in a text is ordinary text, but to
the tokenizers of Hugging Face. Ids that are not in the vocabulary files (added by the tokenizer, or
by --vocab-extra-ids) have a name in `reserved`, and decode to it.
"""

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from zeropp.errors import InputError

END_OF_DOCUMENT = "<|endoftext|>"
NUM_BYTES = 256


class Tokenizer(ABC):
    """Convert text into ids and back.

    fingerprint: a hash that is equal for tokenizers that return the same ids. reserved: names of
    the ids that are not in the vocabulary files. opening, closing: the ids that the model expects
    around a text, such as begin of sentence.
    """

    name: str
    eod: int
    vocab_size: int
    fingerprint: str
    reserved: Mapping[int, str]
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        size: int,
        eod: int,
        identity: Iterable[str | bytes | int],
        added: Iterable[str] = (),
        extra_ids: int = 0,
    ):
        """Assign ids to the `added` names and the extra ids, after the `size` ids of the files.

        `identity` is everything that the ids depend on, for the fingerprint. Raises InputError for
        negative `extra_ids`.
        """
        if extra_ids < 0:
            raise InputError(f"--vocab-extra-ids is {extra_ids}: give 0 or more")
        names = [*added, *(f"<extra_id_{number}>" for number in range(extra_ids))]
        self.reserved = MappingProxyType(dict(enumerate(names, start=size)))
        self.vocab_size = size + len(names)
        self.eod = eod
        self.fingerprint = _digest([self.name, eod, *identity])

    @abstractmethod
    def encode_part(self, text: str) -> list[int]:
        """Return the ids of `text`, with none around them."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a document as Megatron's tool writes them, without end of document."""
        return [*self.opening, *self.encode_part(text), *self.closing]

    def opened(self, ids: Sequence[int]) -> list[int]:
        """Return `opening`, then `ids`; ids that begin with `opening` do not get it twice."""
        has_opening = tuple(ids[: len(self.opening)]) == self.opening
        return [*ids] if has_opening else [*self.opening, *ids]

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt: `opening`, then the ids of `text`."""
        return self.opened(self.encode_part(text))

    def example(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[int], int]:
        """Return the ids of an example, and how many of them come before those of its answer.

        They are `opening`, the prompt, the answer and end of document, none of which come twice. At
        least one id comes before the answer's, as nothing predicts the first.
        """
        ids = self.opened([*prompt, *answer])
        num_before = max(1, len(ids) - len(answer))
        return (ids if ids[-1:] == [self.eod] else [*ids, self.eod]), num_before

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode_part` of each text, in parallel if the library supports it."""
        return [self.encode_part(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all texts, and the number of ids of each text.

        Only one core is used.
        """
        return concatenate([np.array(self.encode(text), dtype=np.int64) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; reserved ids give their names, invalid UTF-8 gives U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        parts = []
        checked_ids = [self._check_id(token) for token in ids]
        for is_reserved, group in groupby(checked_ids, key=self.reserved.__contains__):
            if is_reserved:
                parts += [self.reserved[token] for token in group]
            else:
                parts.append(self._decode(list(group)))
        return "".join(parts)

    def name_of(self, token: int) -> str:
        """Return the name of an id, which special tokens have too though they decode to nothing."""
        return self.decode([token])

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token; None if there is none of that name."""
        return next((token for token, known in self.reserved.items() if known == name), None)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that are in the vocabulary files, none of them reserved."""

    def _check_id(self, token: int) -> int:
        """Return the id; raise InputError if it is outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise InputError(
                f"token id {token} is outside the {self.vocab_size} ids of {self.name}"
            )
        return int(token)


def concatenate(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated arrays of ids, and the length of each array, int64 [len(parts)]."""
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64), counts


def read_bytes(path: str | Path, flag: str) -> bytes:
    """Return the content of the file that `flag` names; InputError names both on failure."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error


def read_text(path: str | Path, flag: str) -> str:
    """Return the text of the file that `flag` names; raise InputError if it is not UTF-8."""
    try:
        return read_bytes(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{flag} {path}: not UTF-8 text (byte {error.start}); is it the right file?"
        ) from error


def require_unicode(text: str, place: str) -> str:
    """Return `text`; raise InputError if the command line gave bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{place}: {text[:40]!r} is not UTF-8 text") from None
    return text


def read_json(path: str | Path, flag: str) -> dict[str, Any]:
    """Return the object in the JSON file that `flag` names; InputError gives line and column."""
    text = read_text(path, flag)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{flag} {path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 5,000 brackets
        raise InputError(f"{flag} {path}: not JSON that can be read ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{flag} {path}: expected an object in braces")
    return content


def load_package(package: str, needed_by: str) -> ModuleType:
    """Import an optional package; raise InputError with the pip command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{needed_by} needs the package {package}: pip install {package} ({error})"
        ) from error


def _digest(parts: Iterable[str | bytes | int]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class ByteLevelTokenizer(Tokenizer):
    """Needs no files: ids 0 to 255 are the bytes of UTF-8; end of document is 256."""

    name = "ByteLevelTokenizer"

    def __init__(self, extra_ids: int = 0):
        super().__init__(
            size=NUM_BYTES, eod=NUM_BYTES, added=[END_OF_DOCUMENT], extra_ids=extra_ids, identity=[]
        )

    def encode_part(self, text: str) -> list[int]:
        """Return the bytes of `text` in UTF-8."""
        return list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class NullTokenizer(Tokenizer):
    """A tokenizer of numbers, for benchmarks and ids as text: "3 14 15" gives [3, 14, 15].

    Ids are below `vocab_size`; `eod` (default: the last one) ends a document.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int, extra_ids: int = 0, eod: int | None = None):
        if vocab_size < 2:
            raise InputError(
                f"--vocab-size is {vocab_size}: NullTokenizer needs at least 2 "
                "(the last id ends a document)"
            )
        last = vocab_size - 1
        if eod is not None and eod > last:
            raise InputError(
                f"--null-tokenizer-eod-id {eod}: --vocab-size {vocab_size} has the ids 0 to {last}"
            )
        identity = [vocab_size] if eod in (None, last) else [vocab_size, eod]
        eod = last if eod is None else eod
        super().__init__(size=vocab_size, eod=eod, extra_ids=extra_ids, identity=identity)

    def encode_part(self, text: str) -> list[int]:
        """Return the whole numbers in `text`, separated by spaces; InputError for other words."""
        return [self._parse_id(word) for word in text.split()]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def _parse_id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()):
            raise InputError(f"NullTokenizer reads whole numbers separated by spaces, not {word!r}")
        return self._check_id(int(word))
