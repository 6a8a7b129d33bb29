"""A tokenizer of numbers, for benchmarks and for ids as text: "3 14 15" gives [3, 14, 15]."""

from megatron_zpp.tokenizer.base import Tokenizer
from zeropp.errors import InputError


class NullTokenizer(Tokenizer):
    """Ids below `vocab_size`; the last one ends a document."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int, extra_ids: int = 0):
        if vocab_size < 2:
            raise InputError(
                f"--vocab-size is {vocab_size}: NullTokenizer needs at least 2 "
                "(the last id ends a document)"
            )
        super().__init__(
            size=vocab_size, eod=vocab_size - 1, extra_ids=extra_ids, identity=[vocab_size]
        )

    def encode_part(self, text: str) -> list[int]:
        """Return the whole numbers in `text`, separated by spaces; InputError for other words."""
        return [self._parse_id(word) for word in text.split()]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def _parse_id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()):
            raise InputError(f"NullTokenizer reads whole numbers separated by spaces, not {word!r}")
        return self._check_id(int(word))
