"""SentencePiece models, under Megatron's three names, each with Megatron's ids.

SentencePieceTokenizer     adds <CLS> <SEP> <EOD> <MASK> (and <PAD> <BOS> <EOS> if the model has
                           none) after the model's pieces; end of document is <EOD>
GPTSentencePieceTokenizer  adds nothing; end of document is the model's end of sentence
Llama2Tokenizer            the same, and every text starts with the model's begin of sentence
"""

from pathlib import Path
from typing import Any

from megatron_zpp.tokenizer.base import Tokenizer, load_package, read_bytes
from zeropp.errors import InputError

ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """The pieces of the model, then Megatron's tokens; end of document is <EOD>."""

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str, extra_ids: int = 0):
        self._model = _load(model_file, self.name)
        size = self._model.get_piece_size()
        pieces = {self._model.id_to_piece(number): number for number in range(size)}
        added = [token for token in self._added_tokens() if token not in pieces]
        ids = pieces | {token: number for number, token in enumerate(added, start=size)}
        super().__init__(
            size=size,
            eod=self._end_of_document(ids, model_file),
            added=added,
            extra_ids=extra_ids,
            identity=[Path(model_file).read_bytes()],
        )

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of `text`; names of special tokens in it are ordinary text."""
        return self._model.encode(text)

    def name_of(self, token: int) -> str:
        """Return the name of an id; see the base class."""
        return self.reserved.get(token) or self._model.id_to_piece(token)

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def _added_tokens(self) -> list[str]:
        special = {
            "<PAD>": self._model.pad_id(),
            "<BOS>": self._model.bos_id(),
            "<EOS>": self._model.eos_id(),
        }
        return [*ADDED, *(token for token, number in special.items() if number < 0)]

    def _end_of_document(self, ids: dict[str, int], model_file: str) -> int:
        return ids["<EOD>"]


class GPTSentencePieceTokenizer(SentencePieceTokenizer):
    """The pieces of the model only; end of document is the model's end of sentence."""

    name = "GPTSentencePieceTokenizer"

    def _added_tokens(self) -> list[str]:
        return []

    def _end_of_document(self, ids: dict[str, int], model_file: str) -> int:
        if self._model.eos_id() < 0:
            raise InputError(
                f"--tokenizer-model {model_file}: has no end of sentence to end documents with; "
                "use --tokenizer-type SentencePieceTokenizer, which adds one"
            )
        return self._model.eos_id()


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """GPTSentencePieceTokenizer with begin of sentence before every encoded text."""

    name = "Llama2Tokenizer"

    def __init__(self, model_file: str, extra_ids: int = 0):
        super().__init__(model_file, extra_ids)
        if self._model.bos_id() < 0:
            raise InputError(
                f"--tokenizer-model {model_file}: has no begin of sentence; use --tokenizer-type "
                "GPTSentencePieceTokenizer, which needs none"
            )
        self.opening = (self._model.bos_id(),)


def _load(path: str, name: str) -> Any:
    library = load_package("sentencepiece", name)
    content = read_bytes(path, "--tokenizer-model")
    try:
        return library.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"--tokenizer-model {path}: not a SentencePiece model ({error})"
        ) from error
