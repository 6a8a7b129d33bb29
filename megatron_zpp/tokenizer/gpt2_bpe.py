"""GPT-2's byte-level BPE from vocab.json and merges.txt, run by tiktoken.

tiktoken wants a rank for every token and joins the neighbours whose union has the lowest rank; the
number of a line in merges.txt is such a rank. That gives GPT-2's own segmentation for whatever a
training can write: lines joining tokens that exist by then, each into a new token (checked here).
Where ranks differ from the ids in vocab.json, they are translated after encoding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megatron_zpp.tokenizer.base import (
    END_OF_DOCUMENT,
    Tokenizer,
    joined,
    load_package,
    read_bytes,
    read_json,
    read_text,
)
from zeropp.errors import InputError

# GPT-2's words, written without backtracking: contractions, letters, digits, other signs, spaces.
WORDS = r"'(?:[smtd]|re|ve|ll)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken's matcher overflows on a million blanks in a row: such runs are cut out. (\s is Rust's.)
LONG_RUN = 100_000
BLANKS = re.compile(rf"[^\S\x1c-\x1f]{{{LONG_RUN},}}")
SPECIAL = re.compile(r"<.+>|\[.+\]")
MAX_SHOWN = 3


class GPT2BPETokenizer(Tokenizer):
    """Ids of `vocab_file`, segmentation of `merge_file`; InputError where the two disagree."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str, merge_file: str, extra_ids: int = 0):
        vocab = _read_vocab(vocab_file)
        if END_OF_DOCUMENT not in vocab:
            raise InputError(f"--vocab-file {vocab_file}: has no token {END_OF_DOCUMENT}")
        pieces = _ranked_pieces(vocab, merge_file, vocab_file)
        _check_all_made(vocab, pieces, vocab_file, merge_file)
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
        # encode_to_numpy needs a special token to look for; none is ever allowed, so none is made.
        self._encoding = load_package("tiktoken", self.name).Encoding(
            name=self.name,
            pat_str=WORDS,
            special_tokens={END_OF_DOCUMENT: len(pieces)},
            mergeable_ranks=dict(zip(pieces.values(), range(len(pieces)), strict=True)),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; a literal <|endoftext|> is ordinary text."""
        ranks = []
        for part in _parts(text):
            ranks += self._encoding.encode_ordinary(part)
        if self._id_of_rank is None:
            return ranks
        return [self._id_of_rank[rank] for rank in ranks]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As the base class says, without a Python integer for every id."""
        ids, counts = joined([self._ranks(text) for text in texts])
        if self._id_of_rank is not None:
            ids = np.array(self._id_of_rank, dtype=np.uint32)[ids]
        return ids, counts

    def _ranks(self, text: str) -> np.ndarray:
        parts = [
            self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _parts(text)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode(self, ids: list[int]) -> str:
        return b"".join(self._bytes_of_id.get(token, b"") for token in ids).decode(errors="replace")


def _parts(text: str) -> Iterator[str]:
    """Cut `text` where GPT-2 cuts anyway: around long runs of blanks, but for their last blank."""
    start = 0
    if len(text) > LONG_RUN:
        for run in BLANKS.finditer(text):
            end = run.end() - (run.end() < len(text))
            yield text[start : run.start()]
            yield text[run.start() : end]
            start = end
    yield text[start:]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


def _read_vocab(path: str) -> dict[str, int]:
    vocab = read_json(path, "--vocab-file")
    if not isinstance(vocab, dict) or not vocab:
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
    """Token -> bytes: the 256 bytes in the order of their ids, then what merges.txt makes."""
    alphabet = _byte_alphabet()
    missing = [f"0x{byte:02x}" for character, byte in alphabet.items() if character not in vocab]
    if missing:
        raise InputError(
            f"--vocab-file {vocab_file}: has no token for {len(missing)} of the 256 bytes "
            f"({', '.join(missing[:MAX_SHOWN])}, ...); it is not a byte-level BPE vocabulary"
        )
    pieces = {one: bytes([alphabet[one]]) for one in sorted(alphabet, key=vocab.__getitem__)}
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
    parts = line.split(" ")
    if len(parts) != 2 or not all(parts):
        return f"expected two tokens and a space between them, got {line!r}"
    for part in parts:
        if part not in pieces:
            return f"{part!r} is neither a byte nor made by an earlier line"
    token = "".join(parts)
    if token not in pieces:
        return ""
    made = [line.replace(" ", "", 1) for line in lines]
    return f"makes {token!r} again, after line {made.index(token) + 1}"


def _check_all_made(
    vocab: Mapping[str, int], made: Mapping[str, bytes], vocab_file: str, merge_file: str
) -> None:
    lost = sorted(vocab.keys() - made.keys(), key=vocab.__getitem__)
    lost = [token for token in lost if not SPECIAL.fullmatch(token)]
    if lost:
        shown = ", ".join(map(repr, lost[:MAX_SHOWN]))
        raise InputError(
            f"--vocab-file {vocab_file}: {len(lost)} tokens ({shown}, ...) are made by no line of "
            f"--merge-file {merge_file}; the files do not belong together, or one is cut off"
        )
