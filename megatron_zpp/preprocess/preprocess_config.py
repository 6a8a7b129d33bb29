"""The flags of `megatron-zpp preprocess`, named as Megatron's."""

import os
from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.settings.flags_without_effect import flags_of
from zeropp.errors import InputError

IDLE = flags_of(
    {
        "text is streamed, and the result is in the order of the input": {
            "partitions": {"type": "integer", "minimum": 1},
            "keep-sequential-samples": "switch",
        }
    }
)


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Section):
    """Input, output and tokenization"""

    input: str | None = flag(
        None,
        "a .jsonl, .json, .txt (also .gz or .zst) or .parquet file, a folder of them, or a "
        "pattern such as 'part*.jsonl'",
    )
    json_keys: tuple[str, ...] | None = flag(
        None,
        "JSON keys or parquet columns with text; each gives one dataset (default: text)",
    )
    output_prefix: str | None = flag(None, "prefix of the names of the output files")
    append_eod: bool = flag(False, "end every document with the end-of-document token")
    split_sentences: bool = flag(False, "write each sentence of a document as a separate sequence")
    keep_newlines: bool = flag(False, "keep the newlines that follow a sentence")
    lang: str = flag("english", "language of the text, for --split-sentences", choices=("english",))
    skip_invalid: bool = flag(False, "skip and count documents that cannot be read")
    bpe_library: str = flag(
        "tiktoken",
        "library that runs GPT2BPETokenizer; fastokens is checked against tiktoken on samples",
        choices=("tiktoken", "fastokens"),
    )
    workers: int = flag(os.cpu_count() or 1, "number of processes that tokenize", minimum=1)
    log_interval: int = flag(1000, "documents between two progress lines", minimum=1)
    dataset_impl: str = flag("mmap", "dataset format", choices=("mmap",))

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys; each gives one dataset."""
        return self.json_keys or ("text",)

    @property
    def prefixes(self) -> list[str]:
        """Return the prefix of each dataset to write, one for each key, as Megatron names them."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.output_prefix}_{key}_{level}" for key in self.keys]

    def check(self) -> None:
        """Raise InputError for missing or contradictory flags."""
        super().check()
        if not self.input or not self.output_prefix:
            raise InputError("give --input FILE|FOLDER and --output-prefix PREFIX; see --help")
        if len(set(self.keys)) < len(self.keys):
            raise InputError(f"--json-keys {' '.join(self.keys)}: a key is given twice")
        if self.keep_newlines and not self.split_sentences:
            raise InputError("--keep-newlines needs --split-sentences: documents stay whole")
