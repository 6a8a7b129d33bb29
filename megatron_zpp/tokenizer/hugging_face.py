"""Any tokenizer.json of Hugging Face's `tokenizers`, with no tokens added around a text.

What its post-processor would put before one, such as begin of sentence, is `opening`: prompts get
it, documents to train on do not.

A tokenizer.json does not say which token ends a document. It is `eos_token` of the
tokenizer_config.json beside it, or else the one token of the vocabulary that bears a usual name.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zpp.tokenizer.base import (
    END_OF_DOCUMENT,
    Tokenizer,
    load_package,
    read_bytes,
    read_json,
)
from zeropp.errors import InputError

USUAL_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<EOD>")


class HFTokenizer(Tokenizer):
    """`model` is a tokenizer.json or a folder that holds one; InputError if no end is declared."""

    name = "HFTokenizer"

    def __init__(self, model: str, extra_ids: int = 0):
        path = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(model)
        content = read_bytes(path, "--tokenizer-model")
        self._tokenizer = _load(path, content, self.name)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise InputError(f"--tokenizer-model {path}: the vocabulary is empty")
        super().__init__(
            size=max(vocab.values()) + 1,
            eod=_end_of_document(path, vocab),
            extra_ids=extra_ids,
            identity=[content],
        )
        self.opening = _opening(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; names of special tokens in it are ordinary text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, encoded on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _load(path: Path, content: bytes, name: str) -> Any:
    library = load_package("tokenizers", name)
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    # The library raises bare Exception for every kind of bad file.
    except Exception as error:
        raise InputError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """What its post-processor puts before a text."""
    found = tokenizer.encode("a", add_special_tokens=True)
    added = found.special_tokens_mask
    return tuple(found.ids[: added.index(0)]) if 0 in added else ()


def _end_of_document(path: Path, vocab: Mapping[str, int]) -> int:
    beside = path.with_name("tokenizer_config.json")
    declared = _declared_end(beside)
    if declared is not None:
        if declared not in vocab:
            raise InputError(f"{beside}: eos_token {declared!r} is not in {path}")
        return vocab[declared]
    found = [token for token in USUAL_ENDS if token in vocab]
    if len(found) != 1:
        raise InputError(
            f"--tokenizer-model {path}: which token ends a document? Of the usual names it has "
            f"{' and '.join(found) or 'none'}; put a tokenizer_config.json "
            'with {"eos_token": "..."} beside it'
        )
    return vocab[found[0]]


def _declared_end(path: Path) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, an object with `content`, or nothing."""
    if not path.exists():
        return None
    config = read_json(path, "--tokenizer-model: the file beside it,")
    end = config.get("eos_token") if isinstance(config, dict) else None
    end = end.get("content") if isinstance(end, dict) else end
    if end is not None and not isinstance(end, str):
        raise InputError(f"{path}: eos_token is {end!r}, expected a string")
    return end
