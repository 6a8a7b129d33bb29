"""The tokenizers of Hugging Face: the ids of a text are those of transformers.

transformers reads a folder. A tokenizer.json without other files beside it says everything, and is
read without transformers. The token that ends a document is transformers' `eos_token`, or else the
only token with one of the usual names.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zpp.tokenizer.base import END_OF_DOCUMENT, Tokenizer, load_package, read_bytes
from zeropp.errors import InputError

TOKENIZER_JSON = "tokenizer.json"
# Files beside it that tell transformers of further tokens, or of a class with rules of its own.
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
USUAL_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<EOD>")


class HFTokenizer(Tokenizer):
    """`model` is a folder that transformers reads, or a tokenizer.json.

    Names of special tokens in a text are their ids. `plain`: `encode` adds nothing around a text.
    Raises InputError if the files cannot be read or do not determine the end of a document.
    """

    name = "HFTokenizer"

    def __init__(self, model: str, plain: bool = False, extra_ids: int = 0):
        path = Path(model) / TOKENIZER_JSON if Path(model).is_dir() else Path(model)
        has_settings = [(path.parent / name).is_file() for name in SETTINGS]
        if not path.exists() and (not any(has_settings) or path.name != TOKENIZER_JSON):
            raise InputError(
                f"--tokenizer-model {path}: No such file; nothing is downloaded: give a "
                "tokenizer.json or the folder of one"
            )
        identity, vocab, eos = [], {}, None
        if path.exists():
            identity.append(read_bytes(path, "--tokenizer-model"))
            self._tokenizer = _parse(path, identity[0], self.name)
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if any(has_settings):
            self._tokenizer, eos = _read_folder(path, self.name)
            known, vocab = vocab, self._tokenizer.get_vocab(with_added_tokens=True)
            if added := sorted(vocab.items() - known.items()):
                identity.append(json.dumps(added))
        if not vocab:
            raise InputError(f"--tokenizer-model {path}: the vocabulary is empty")
        super().__init__(
            size=max(vocab.values()) + 1,
            eod=_end_of_document(path, vocab) if eos is None else vocab[eos],
            extra_ids=extra_ids,
            identity=identity,
        )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if not plain:
            self.opening, self.closing = _around_text(self._tokenizer)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of `text` alone."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text alone, encoded on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def id_of(self, name: str) -> int | None:
        """Return the id of a token; None if there is none of that name."""
        return (
            super().id_of(name) if (token := self._tokenizer.token_to_id(name)) is None else token
        )

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _parse(path: Path, content: bytes, name: str) -> Any:
    """Return the backend of a tokenizer.json alone."""
    library = load_package("tokenizers", name)
    try:
        return library.Tokenizer.from_buffer(content)
    # The library raises a bare Exception for every invalid file.
    except Exception as error:
        raise InputError(f"--tokenizer-model {path}: not a tokenizer.json ({error})") from error


def _read_folder(path: Path, name: str) -> tuple[Any, str | None]:
    """Return the backend and end of sentence of the tokenizer in the folder of `path`."""
    transformers = load_package("transformers", f"{name} with files beside tokenizer.json")
    if path.name == TOKENIZER_JSON:
        read, named = transformers.AutoTokenizer.from_pretrained, {"trust_remote_code": False}
    else:
        read = transformers.PreTrainedTokenizerFast.from_pretrained
        named = {"tokenizer_file": str(path)}
    try:
        loaded = read(str(path.parent), local_files_only=True, **named)
        return loaded.backend_tokenizer, loaded.eos_token
    # transformers raises what it comes across, for each class of tokenizers something else.
    except Exception as error:
        raise InputError(
            f"--tokenizer-model {path.parent}: transformers cannot read it ({error})"
        ) from error


def _around_text(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor puts before and behind a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    is_special = encoding.special_tokens_mask
    if 0 not in is_special:
        return tuple(encoding.ids), ()
    first, last = is_special.index(0), len(is_special) - is_special[::-1].index(0)
    return tuple(encoding.ids[:first]), tuple(encoding.ids[last:])


def _end_of_document(path: Path, vocab: Mapping[str, int]) -> int:
    """Return the id of the only usual end in the vocabulary."""
    candidates = [token for token in USUAL_ENDS if token in vocab]
    if len(candidates) != 1:
        raise InputError(
            f"--tokenizer-model {path}: which token ends a document? Of the usual names it has "
            f"{' and '.join(candidates) or 'none'}; put a tokenizer_config.json "
            'with {"eos_token": "..."} beside it'
        )
    return vocab[candidates[0]]
