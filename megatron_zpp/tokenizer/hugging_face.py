"""Any tokenizer.json of Hugging Face's `tokenizers`, without special tokens around a text.

The ids that its post-processor puts before a text, such as begin of sentence, are `opening`: they
are added to prompts, but not to training documents.

A tokenizer.json does not declare which token ends a document. That is `eos_token` of the
tokenizer_config.json in the same folder, or else the only token with one of the usual names.
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
    """`model` is a tokenizer.json, or a folder with one.

    Raises InputError if it cannot be read or does not determine the end of a document.
    """

    name = "HFTokenizer"

    def __init__(self, model: str, extra_ids: int = 0):
        path = Path(model) / "tokenizer.json" if Path(model).is_dir() else Path(model)
        if not path.exists():
            raise InputError(
                f"--tokenizer-model {path}: No such file; nothing is downloaded: give a "
                "tokenizer.json or the folder of one"
            )
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
        """Return the ids of `text`; names of special tokens in it are ordinary text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def id_of(self, name: str) -> int | None:
        """Return the id of a token; None if there is none of that name."""
        return (
            super().id_of(name) if (token := self._tokenizer.token_to_id(name)) is None else token
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _load(path: Path, content: bytes, name: str) -> Any:
    library = load_package("tokenizers", name)
    try:
        tokenizer = library.Tokenizer.from_buffer(content)
    # The library raises a bare Exception for every invalid file.
    except Exception as error:
        raise InputError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that the post-processor puts before a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    is_special = encoding.special_tokens_mask
    if 0 not in is_special:
        return ()
    return tuple(encoding.ids[: is_special.index(0)])


def _end_of_document(path: Path, vocab: Mapping[str, int]) -> int:
    config_path = path.with_name("tokenizer_config.json")
    eos_token = _eos_token(config_path)
    if eos_token is not None:
        if eos_token not in vocab:
            raise InputError(f"{config_path}: eos_token {eos_token!r} is not in {path}")
        return vocab[eos_token]
    candidates = [token for token in USUAL_ENDS if token in vocab]
    if len(candidates) != 1:
        raise InputError(
            f"--tokenizer-model {path}: which token ends a document? Of the usual names it has "
            f"{' and '.join(candidates) or 'none'}; put a tokenizer_config.json "
            'with {"eos_token": "..."} beside it'
        )
    return vocab[candidates[0]]


def _eos_token(path: Path) -> str | None:
    """Return `eos_token` of a tokenizer_config.json: a string, or the `content` of an object."""
    if not path.exists():
        return None
    config = read_json(path, "--tokenizer-model: the file beside it,")
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise InputError(f"{path}: eos_token is {token!r}, expected a string")
    return token
