"""GPT-2's byte-level BPE run by fastokens, some ten times as fast as tiktoken.

fastokens is optional and young. Whoever uses it compares its ids with those of GPT2BPETokenizer on
a sample of the text at hand. It reads the content of a tokenizer.json, which is made here from
vocab.json and merges.txt. No token is declared special, so that a name in a text is ordinary text.
"""

from collections.abc import Sequence

import numpy as np
import orjson

from megatron_zpp.tokenizer.base import load_package, read_json, read_text
from zeropp.errors import InputError

NAME = "fastokens"
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
}  # fmt: skip


class FastGPT2:
    """Encodes many texts at once; InputError if the package is not there or rejects the files.

    The files are those that GPT2BPETokenizer has accepted.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab = read_json(vocab_file, "--vocab-file")
        lines = read_text(merge_file, "--merge-file").split("\n")
        lines = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :]]
        merges = [line for line in lines if line]
        bytes_ = sorted((token for token in vocab if len(token) == 1), key=vocab.__getitem__)
        tokens = bytes_ + [line.replace(" ", "", 1) for line in merges]
        # It wants ids without gaps: it is given ranks, which are GPT-2's ids but for the last one.
        self._id_of_rank = np.array([vocab[token] for token in tokens], dtype=np.uint32)
        self._is_translated = not np.array_equal(self._id_of_rank, np.arange(len(tokens)))
        model = {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: rank for rank, token in enumerate(tokens)}, "merges": merges,
        }  # fmt: skip
        content = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "pre_tokenizer": BYTE_LEVEL, "post_processor": None,
            "decoder": BYTE_LEVEL, "model": model,
        }  # fmt: skip
        library = load_package(NAME, f"--bpe-library {NAME}")
        try:
            self._tokenizer = library.Tokenizer.from_json_str(orjson.dumps(content).decode())
        except ValueError as error:
            raise InputError(
                f"{NAME} cannot use --vocab-file {vocab_file} and --merge-file {merge_file} "
                f"({error}); leave out --bpe-library {NAME}"
            ) from error

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, one after another, and how many each text has."""
        content, offsets = self._tokenizer.encode_batch_flat(list(texts))
        ids = np.frombuffer(content, dtype=np.uint32)
        counts = np.diff(np.frombuffer(offsets, dtype=np.uint64).astype(np.int64))
        return self._id_of_rank[ids] if self._is_translated else ids, counts
