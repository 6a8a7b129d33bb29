"""GPT-2's byte-level BPE from vocab.json and merges.txt, with tiktoken.

tiktoken needs a rank for every token, and merges the neighbours whose union has the lowest rank;
the line number in merges.txt is such a rank. The result is GPT-2's own segmentation if each line of
merges.txt joins tokens of earlier lines into a new token, as every trainer writes it (checked
here). Ranks that differ from the ids in vocab.json are translated after encoding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_zpp.tokenizer.base import (
    END_OF_DOCUMENT,
    Tokenizer,
    concatenate,
    load_package,
    read_bytes,
    read_json,
    read_text,
)
from zeropp.errors import InputError

# GPT-2's pattern without backtracking: contractions, letters, digits, other signs, white space.
WORDS = r"'(?:[smtd]|re|ve|ll)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken's matcher overflows on a million blanks in a row, so that long runs are encoded
# separately. The class is \s as Rust defines it.
LONG_RUN = 100_000
BLANKS = re.compile(rf"[^\S\x1c-\x1f]{{{LONG_RUN},}}")
SPECIAL = re.compile(r"<.+>|\[.+\]")
MAX_SHOWN = 3


class GPT2BPETokenizer(Tokenizer):
    """Ids of `vocab_file`, segmentation of `merge_file`.

    Raises InputError if the files cannot be read or do not belong together.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str, extra_ids: int = 0):
        vocab = _read_vocab(vocab_file)
        if END_OF_DOCUMENT not in vocab:
            raise InputError(f"--vocab-file {vocab_file}: has no token {END_OF_DOCUMENT}")
        pieces = _ranked_pieces(vocab, merge_file, vocab_file)
        _check_all_mergeable(vocab, pieces, vocab_file, merge_file)
        super().__init__(
            size=max(vocab.values()) + 1,
            eod=vocab[END_OF_DOCUMENT],
            extra_ids=extra_ids,
            identity=[
                read_bytes(vocab_file, "--vocab-file"),
                read_bytes(merge_file, "--merge-file"),
            ],
        )
        ids = [vocab[token] for token in pieces]
        self._id_of_rank = None if ids == list(range(len(ids))) else ids
        self._bytes_of_id = dict(zip(ids, pieces.values(), strict=True))
        special = vocab.keys() - pieces.keys()
        self._bytes_of_id.update((vocab[token], token.encode()) for token in special)
        # encode_to_numpy needs a special token; no text is ever encoded to it, as none is allowed.
        self._encoding = load_package("tiktoken", self.name).Encoding(
            name=self.name,
            pat_str=WORDS,
            special_tokens={END_OF_DOCUMENT: len(pieces)},
            mergeable_ranks=dict(zip(pieces.values(), range(len(pieces)), strict=True)),
        )

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of `text`; a literal <|endoftext|> is ordinary text."""
        ranks = []
        for part in _split_long_runs(text):
            ranks += self._encoding.encode_ordinary(part)
        if self._id_of_rank is None:
            return ranks
        return [self._id_of_rank[rank] for rank in ranks]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """See the base class; no Python integer is created for an id."""
        ids, counts = concatenate([self._ranks(text) for text in texts])
        if self._id_of_rank is not None:
            ids = np.array(self._id_of_rank, dtype=np.uint32)[ids]
        return ids, counts

    def _ranks(self, text: str) -> np.ndarray:
        ranks = [
            self._encoding.encode_to_numpy(part, disallowed_special=())
            for part in _split_long_runs(text)
        ]
        return ranks[0] if len(ranks) == 1 else np.concatenate(ranks)

    def _decode(self, ids: list[int]) -> str:
        return b"".join(self._bytes_of_id.get(token, b"") for token in ids).decode(errors="replace")


def _split_long_runs(text: str) -> Iterator[str]:
    """Yield the parts of `text` before, in and after long runs of blanks.

    GPT-2 splits there anyway; the last blank of a run belongs to what follows.
    """
    start = 0
    if len(text) > LONG_RUN:
        for run in BLANKS.finditer(text):
            end = run.end() - (run.end() < len(text))
            yield text[start : run.start()]
            yield text[run.start() : end]
            start = end
    yield text[start:]


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character that represents a byte in GPT-2's files."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def _read_vocab(path: str) -> dict[str, int]:
    vocab = read_json(path, "--vocab-file")
    if not vocab:
        raise InputError(f'--vocab-file {path}: expected one JSON object {{"token": id, ...}}')
    for token, number in vocab.items():
        if type(number) is not int or number < 0:
            raise InputError(
                f"--vocab-file {path}: id of {token!r} is {number!r}, not a whole number"
            )
    if len(set(vocab.values())) < len(vocab):
        raise InputError(f"--vocab-file {path}: two tokens have the same id")
    return vocab


def _ranked_pieces(vocab: Mapping[str, int], path: str, vocab_file: str) -> dict[str, bytes]:
    """Return the bytes of each token: the single bytes by id, then the merges by line."""
    alphabet = byte_alphabet()
    missing = [f"0x{byte:02x}" for character, byte in alphabet.items() if character not in vocab]
    if missing:
        raise InputError(
            f"--vocab-file {vocab_file}: has no token for {len(missing)} of the 256 bytes "
            f"({', '.join(missing[:MAX_SHOWN])}, ...); it is not a byte-level BPE vocabulary"
        )
    characters = sorted(alphabet, key=vocab.__getitem__)
    pieces = {character: bytes([alphabet[character]]) for character in characters}
    lines = [line.rstrip("\r") for line in read_text(path, "--merge-file").split("\n")]
    for number, line in enumerate(lines, start=1):
        left, _, right = line.partition(" ")
        token = left + right
        if left in pieces and right in pieces and token in vocab and token not in pieces:
            pieces[token] = pieces[left] + pieces[right]
        elif line and not (number == 1 and line.startswith("#version")):
            problem = _merge_problem(line, pieces, lines) or (
                f"{token!r} is not in --vocab-file {vocab_file}; they do not belong together"
            )
            raise InputError(f"--merge-file {path}, line {number}: {problem}")
    return pieces


def _merge_problem(line: str, pieces: Mapping[str, bytes], lines: Sequence[str]) -> str:
    """Return what is wrong with a line of merges.txt; "" if only its token is unknown."""
    parts = line.split(" ")
    if len(parts) != 2 or not all(parts):
        return f"expected two tokens and a space between them, got {line!r}"
    for part in parts:
        if part not in pieces:
            return f"{part!r} is neither a byte nor made by an earlier line"
    token = "".join(parts)
    if token not in pieces:
        return ""
    tokens = [line.replace(" ", "", 1) for line in lines]
    return f"makes {token!r} again, after line {tokens.index(token) + 1}"


def _check_all_mergeable(
    vocab: Mapping[str, int], pieces: Mapping[str, bytes], vocab_file: str, merge_file: str
) -> None:
    """Raise InputError if ordinary tokens of the vocabulary are not the result of any merge."""
    unreachable = [token for token in vocab if token not in pieces and not SPECIAL.fullmatch(token)]
    if unreachable:
        unreachable.sort(key=vocab.__getitem__)
        examples = ", ".join(map(repr, unreachable[:MAX_SHOWN]))
        raise InputError(
            f"--vocab-file {vocab_file}: {len(unreachable)} tokens ({examples}, ...) are "
            f"made by no line of --merge-file {merge_file}; the files do not belong together, or "
            "one is cut off"
        )
