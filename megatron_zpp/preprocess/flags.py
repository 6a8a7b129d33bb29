"""The flags of tools/preprocess_data.py, named as Megatron's."""

import os
from dataclasses import dataclass

from megatron_zpp.settings.flag import Section, flag, ignored
from zeropp.errors import InputError

IN_ORDER = "text is streamed, and the result is in the order of the input"


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Section):
    """What to read, what to write and how"""

    input: str | None = flag(
        None, "a .jsonl, .json, .txt (these also .gz or .zst) or .parquet file, or a folder of them"
    )
    json_keys: tuple[str, ...] | None = flag(
        None, "keys of a line, or columns, that hold text, a dataset for each (default text)"
    )
    output_prefix: str | None = flag(None, "beginning of the names of the files to write")
    append_eod: bool = flag(False, "end every document with the end-of-document token")
    split_sentences: bool = flag(False, "make every sentence of a document a sequence of its own")
    keep_newlines: bool = flag(False, "sentences keep the line ends that follow them")
    lang: str = flag("english", "language of the sentences", choices=("english",))
    skip_invalid: bool = flag(False, "leave out documents that cannot be read, and count them")
    bpe_library: str = flag(
        "tiktoken",
        "runs GPT2BPETokenizer; fastokens is compared with tiktoken on a sample of the text",
        choices=("tiktoken", "fastokens"),
    )
    workers: int = flag(os.cpu_count() or 1, "processes that tokenize", minimum=1)
    partitions: int = ignored(1, IN_ORDER, minimum=1)
    keep_sequential_samples: bool = ignored(False, IN_ORDER)
    log_interval: int = flag(1000, "documents between two lines of progress", minimum=1)
    dataset_impl: str = flag("mmap", "the format; there is one", choices=("mmap",))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, one dataset each."""
        return self.json_keys or ("text",)

    @property
    def prefixes(self) -> list[str]:
        """The datasets to write, one for each key, named as Megatron names them."""
        level = "sentence" if self.split_sentences else "document"
        return [f"{self.output_prefix}_{key}_{level}" for key in self.keys]

    def check(self) -> None:
        """Raise InputError for what is missing or contradicts itself."""
        super().check()
        if not self.input or not self.output_prefix:
            raise InputError("give --input FILE|FOLDER and --output-prefix PREFIX; see --help")
        if len(set(self.keys)) < len(self.keys):
            raise InputError(f"--json-keys {' '.join(self.keys)}: a key is given twice")
        if self.keep_newlines and not self.split_sentences:
            raise InputError("--keep-newlines needs --split-sentences: documents stay whole")
