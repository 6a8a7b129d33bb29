"""A tokenizer without files: the ids are the bytes of UTF-8, and 256 ends a document."""

from megatron_zpp.tokenizer.base import END_OF_DOCUMENT, Tokenizer

NUM_BYTES = 256


class ByteLevelTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes; end of document is 256."""

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
