"""GPT-2's byte-level BPE with fastokens, which is about ten times as fast as tiktoken.

fastokens is optional and new: a caller must compare its ids with those of GPT2BPETokenizer on a
sample of its text. The library reads the content of a tokenizer.json, which is generated here from
vocab.json and merges.txt. No token is declared special, so that its name in a text is ordinary
text.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_zpp.tokenizer.base import load_package, read_json, read_text
from zeropp.errors import InputError

FASTOKENS = "fastokens"


class FastGPT2:
    """Encode many texts at once, with files that GPT2BPETokenizer has accepted.

    Raises InputError if fastokens is not installed or rejects the files.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab = read_json(vocab_file, "--vocab-file")
        lines = read_text(merge_file, "--merge-file").split("\n")
        lines = [line.rstrip("\r") for line in lines[lines[0].startswith("#version") :]]
        merges = [line for line in lines if line]
        byte_tokens = sorted((token for token in vocab if len(token) == 1), key=vocab.__getitem__)
        tokens = byte_tokens + [line.replace(" ", "", 1) for line in merges]
        # fastokens needs ids without gaps: it uses ranks, which equal GPT-2's ids except the last.
        self._id_of_rank = np.array([vocab[token] for token in tokens], dtype=np.uint32)
        self._needs_translation = not np.array_equal(self._id_of_rank, np.arange(len(tokens)))
        ranks = {token: rank for rank, token in enumerate(tokens)}
        model = Tokenizer(models.BPE(ranks, [tuple(line.split(" ")) for line in merges]))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library = load_package(FASTOKENS, f"--bpe-library {FASTOKENS}")
        try:
            self._tokenizer = library.Tokenizer.from_json_str(model.to_str())
        except ValueError as error:
            raise InputError(
                f"{FASTOKENS} cannot use --vocab-file {vocab_file} and --merge-file {merge_file} "
                f"({error}); leave out --bpe-library {FASTOKENS}"
            ) from error

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all texts, and the number of ids of each text."""
        content, offsets = self._tokenizer.encode_batch_flat(list(texts))
        ids = np.frombuffer(content, dtype=np.uint32)
        counts = np.diff(np.frombuffer(offsets, dtype=np.uint64).astype(np.int64))
        if self._needs_translation:
            ids = self._id_of_rank[ids]
        return ids, counts
