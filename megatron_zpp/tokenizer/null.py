"""A tokenizer of numbers, for benchmarks and for ids as text: "3 14 15" gives [3, 14, 15]."""

from megatron_zpp.tokenizer.base import Tokenizer
from zeropp.errors import InputError


class NullTokenizer(Tokenizer):
    """Ids below `vocab_size`; `eod` (default: the last one) ends a document."""

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
