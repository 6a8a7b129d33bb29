"""What every tokenizer offers, and how it proves that two of them are the same.

Ids run from 0 to vocab_size - 1. The end-of-document id `eod` is never made from text: a text that
spells its name is ordinary text. Ids that the vocabulary files do not know (added by us, or by
--vocab-extra-ids) have a name in `reserved`, which is what they decode to.
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


class Tokenizer(ABC):
    """Turns text into ids and back; `fingerprint` is equal where the ids are.

    `opening` are the ids that its model expects before a text, such as begin of sentence.
    """

    name: str
    eod: int
    vocab_size: int
    fingerprint: str
    reserved: Mapping[int, str]
    opening: tuple[int, ...] = ()

    def __init__(
        self,
        *,
        size: int,
        eod: int,
        identity: Iterable[str | bytes | int],
        added: Iterable[str] = (),
        extra_ids: int = 0,
    ):
        """Number the `added` names and the extra ids after the `size` ids of the vocabulary."""
        if extra_ids < 0:
            raise InputError(f"--vocab-extra-ids is {extra_ids}: give 0 or more")
        names = [*added, *(f"<extra_id_{number}>" for number in range(extra_ids))]
        self.reserved = MappingProxyType(dict(enumerate(names, start=size)))
        self.vocab_size = size + len(names)
        self.eod = eod
        self.fingerprint = _digest([self.name, eod, *identity])

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without end of document."""

    def prompt(self, text: str) -> list[int]:
        """Ids of a text as its model has seen texts begin: `opening`, then `encode`."""
        return [*self.opening, *self.encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text: `encode` of each, in parallel where the library can."""
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, one after another, and how many each text has; on this core."""
        return joined([np.array(self.encode(text), dtype=np.int64) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; reserved ids give their names, broken UTF-8 gives U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        parts = []
        for is_reserved, group in groupby(map(self._checked, ids), key=self.reserved.__contains__):
            run = list(group)
            parts += [self.reserved[token] for token in run] if is_reserved else [self._decode(run)]
        return "".join(parts)

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ids of the vocabulary, none of them reserved."""

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise InputError(
                f"token id {token} is outside the {self.vocab_size} ids of {self.name}"
            )
        return int(token)


def joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of ids as one, and the length of each, int64 [len(parts)]."""
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64), counts


def read_bytes(path: str | Path, flag: str) -> bytes:
    """Content of a file a person named by `flag`; InputError names both if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}") from error


def read_text(path: str | Path, flag: str) -> str:
    """UTF-8 text of a file a person named by `flag`; InputError says what is wrong with it."""
    try:
        return read_bytes(path, flag).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{flag} {path}: not UTF-8 text (byte {error.start}); is it the right file?"
        ) from error


def read_json(path: str | Path, flag: str) -> Any:
    """Value of a JSON file a person named by `flag`; InputError gives line and column."""
    text = read_text(path, flag)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{flag} {path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 5,000 brackets
        raise InputError(f"{flag} {path}: not JSON that can be read ({error})") from error


def load_package(package: str, needed_by: str) -> ModuleType:
    """Import an optional package, or raise InputError with the pip command that brings it."""
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
