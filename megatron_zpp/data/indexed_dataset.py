"""Megatron's pair of files: `.bin` holds the token ids, `.idx` the bounds of the sequences.

    .idx  MMIDIDX\\0\\0 | u64 version 1 | u8 type of a token | u64 sequences n | u64 entries d
          int32 lengths[n] (tokens) | int64 pointers[n] (bytes) | int64 documents[d] | int8 modes[n]

Document j consists of the sequences documents[j] to documents[j + 1] - 1; an empty document has
none. The modes are optional and not used in training. All numbers are little endian.
"""

import glob
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zeropp.atomic import write_atomically
from zeropp.errors import InputError, first_few

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CHUNK = 1 << 20  # sequences that are checked or written at once
UINT16_LIMIT = 65500  # Megatron's bound on the vocabulary, below the 65536 of the type


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of a token on disk for a vocabulary size, as in Megatron."""
    return np.dtype("<u2" if vocab_size < UINT16_LIMIT else "<i4")


class IndexedDataset:
    """A memory-mapped dataset.

    lengths: int32 [n], tokens of each sequence. document_index: int64 [d]. pointers: int64 [n],
    byte offsets in the .bin. modes: int8 [n], or None if the file has none. Raises InputError if a
    file is missing, is not a Megatron file, or does not match the other file.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path, self.bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        require_pair(self.prefix)
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        self.dtype, self.lengths, self.pointers, self.document_index = _parse(index, self.idx_path)
        modes = index[HEADER.size + 12 * len(self) + 8 * len(self.document_index) :]
        self.modes = modes.view(np.int8) if len(modes) else None
        self._check_documents()
        self._check_extent()
        self._tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def __reduce__(self) -> tuple:
        # The process that unpickles a dataset maps the files itself; the arrays are not sent.
        return IndexedDataset, (self.prefix,)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return the tokens [length] of one sequence from `offset` on: a read-only view."""
        available = int(self.lengths[sequence]) - offset
        length = available if length is None else length
        assert 0 <= offset and 0 <= length <= available, (sequence, offset, length)
        start = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def _check_documents(self) -> None:
        """Raise InputError unless the documents cover all sequences in order."""
        documents = self.document_index
        if not len(self.lengths):
            raise InputError(f"{self.idx_path} holds no sequence: the dataset is empty")
        covers_all = len(documents) and documents[0] == 0 and documents[-1] == len(self.lengths)
        if not covers_all or (documents[1:] < documents[:-1]).any():
            raise InputError(
                f"{self.idx_path} is damaged: its document index should rise from 0 to the "
                f"{len(self.lengths)} sequences of the file; preprocess the text again"
            )

    def _check_extent(self) -> None:
        """Raise InputError unless the .bin ends with the last sequence."""
        token_bytes, expected_bytes = self.dtype.itemsize, 0
        for lengths, pointers in zip(_blocks(self.lengths), _blocks(self.pointers), strict=True):
            # Negative if it exceeds 64 bits.
            ends = pointers + lengths.astype(np.int64) * token_bytes
            if min(lengths.min(), pointers.min(), ends.min()) < 0 or (pointers % token_bytes).any():
                raise InputError(
                    f"{self.idx_path} is damaged: a length or pointer is negative or too large, or "
                    f"inside a token of {token_bytes} bytes; preprocess the text again"
                )
            expected_bytes = max(expected_bytes, int(ends.max()))
        num_bytes = self.bin_path.stat().st_size
        if expected_bytes == 0:
            raise InputError(f"{self.bin_path} holds no token: the dataset is empty")
        if num_bytes != expected_bytes:
            raise InputError(
                f"{self.bin_path} has {num_bytes} bytes, but {self.idx_path} describes "
                f"{expected_bytes}: the file is truncated, or the two belong to different "
                "datasets; copy or preprocess both again"
            )


def write_dataset(
    prefix: str | Path, vocab_size: int, documents: Iterable[Iterable[Sequence[int] | np.ndarray]]
) -> int:
    """Write documents, each the token ids of its sequences; return the number of tokens.

    Both files are complete, or they are as they were before. Raises InputError if there are no
    tokens, and for ids outside the vocabulary.
    """
    idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    dtype = token_dtype(vocab_size)
    lengths, bounds = array("i"), array("q", [0])  # int32, int64

    def write_tokens(file: BinaryIO) -> None:
        for document in documents:
            for sequence in document:
                tokens = np.asarray(sequence, dtype=np.int64)
                if (invalid := id_outside(tokens, vocab_size)) is not None:
                    raise InputError(
                        f"token id {invalid} does not fit {bin_path}: the vocabulary has "
                        f"{vocab_size} entries (ids 0 to {vocab_size - 1})"
                    )
                file.write(tokens.astype(dtype).tobytes())
                lengths.append(tokens.size)
            bounds.append(len(lengths))
        if not any(lengths):
            raise InputError(f"no tokens for {bin_path}: the text is empty")
        # Without an index there is no dataset: a new .bin is never read with an old .idx.
        idx_path.unlink(missing_ok=True)

    bin_path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(bin_path, write_tokens)
    arrays = np.frombuffer(lengths, dtype=np.int32), np.frombuffer(bounds, dtype=np.int64)
    write_atomically(idx_path, lambda file: write_index(file, dtype, *arrays))
    return sum(lengths)


def id_outside(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Return the first of the ids [length] that a vocabulary does not have; None if it has all."""
    if not tokens.size or 0 <= tokens.min() <= tokens.max() < vocab_size:
        return None
    return int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])


def require_pair(prefix: str) -> None:
    """Raise InputError if the files of a dataset are not there."""
    idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [path for path in (idx_path, bin_path) if not path.is_file()]
    if not missing and not idx_path.stat().st_size:
        raise InputError(f"{idx_path} has 0 bytes, expected {HEADER.size} or more: not an index")
    if not missing:
        return
    if len(missing) == 1:
        raise InputError(f"{missing[0]} is missing: a dataset is a pair of .idx and .bin")
    hint = datasets_beside(prefix) or "preprocess the text first (tools/preprocess_data.py)"
    if prefix.endswith((".bin", ".idx")):
        hint = f"give the path without its ending, {prefix[:-4]}"
    raise InputError(f"no dataset at {prefix}: expected {idx_path} and {bin_path}; {hint}")


def datasets_beside(prefix: str) -> str:
    """Ask whether a dataset was meant whose prefix goes on from `prefix`; "" if there is none.

    The preprocessor appends the field and the level, as in corpus_text_document.
    """
    folder, name = Path(prefix).parent, glob.escape(Path(prefix).name)
    longer = [
        str(path.with_suffix(""))
        for path in sorted(folder.glob(f"{name}_*.idx"))
        if path.with_suffix(".bin").is_file()
    ]
    return f"did you mean {first_few(longer)}?" if longer else ""


def _parse(index: np.memmap, path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the token type, and views of the lengths, the pointers and the document index.

    They are int32 [n], int64 [n] and int64 [d]. Raises InputError for an invalid file.
    """
    if len(index) < HEADER.size or bytes(index[: len(MAGIC)]) != MAGIC:
        raise InputError(
            f"{path} is not a Megatron index: {len(index)} bytes that begin with "
            f"{bytes(index[: len(MAGIC)])!r}, expected at least {HEADER.size} and {MAGIC!r}"
        )
    _, version, code, sequences, entries = HEADER.unpack(bytes(index[: HEADER.size]))
    if version != VERSION:
        raise InputError(f"{path} is of version {version}; this reads version {VERSION}")
    if code not in CODES:
        raise InputError(f"{path} gives its tokens the type code {code}: expected 1 to 8")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if len(index) not in (expected, expected + sequences):
        raise InputError(
            f"{path} has {len(index)} bytes, but its header describes {expected} ({sequences} "
            f"sequences, {entries} document entries): copy or preprocess the dataset again"
        )
    pointers = HEADER.size + 4 * sequences
    documents = pointers + 8 * sequences
    return (
        np.dtype(CODES[code]),
        index[HEADER.size : pointers].view("<i4"),
        index[pointers:documents].view("<i8"),
        index[documents : documents + 8 * entries].view("<i8"),
    )


def index_header(dtype: np.dtype, num_sequences: int, num_entries: int) -> bytes:
    """Return the header of an .idx, for tokens of `dtype`."""
    code = next(code for code, name in CODES.items() if np.dtype(name) == dtype)
    return HEADER.pack(MAGIC, VERSION, code, num_sequences, num_entries)


def write_index(
    file: BinaryIO, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Write an .idx in bounded memory: the arrays, int32 [n] and int64 [d], may be mapped files."""
    file.write(index_header(dtype, len(lengths), len(documents)))
    for block in _blocks(lengths):
        file.write(block.tobytes())
    start = 0
    for block in _blocks(lengths):
        ends = start + np.cumsum(block, dtype=np.int64) * dtype.itemsize
        file.write((ends - block.astype(np.int64) * dtype.itemsize).tobytes())
        start = int(ends[-1])
    for block in _blocks(documents):
        file.write(block.tobytes())


def _blocks(numbers: np.ndarray) -> list[np.ndarray]:
    return [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]
