"""Text into Megatron's `.bin` and `.idx`: a document is one line of a .jsonl, or one .txt file.

    python tools/preprocess_data.py --input books.jsonl --output-prefix books --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

makes books_text_document.bin and .idx, whose prefix `pretrain_gpt.py --data-path` takes. This
process reads and writes, workers tokenize; results are written in the order of the input, so they
do not depend on --workers. Few chunks are under way at a time: memory does not grow with the input,
only with its longest document. Both files appear when all is done, or not at all.
"""

import functools
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from megatron_zpp.command_line import HELP, help_text, read, vocabulary
from megatron_zpp.config import TokenizerConfig
from megatron_zpp.config.flag import Section, flag
from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.errors import InputError

LINES, WHOLE = (".jsonl", ".json"), ".txt"
CHUNK_BYTES = 1 << 18  # of lines that go to a worker at once
CHUNKS_PER_WORKER = 3
SHOWN = 60  # characters of a bad line
USAGE = (
    "usage: python tools/preprocess_data.py --input FILE|FOLDER --output-prefix PREFIX "
    "--tokenizer-type TYPE [flags]"
)


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(Section):
    """What to read, what to write and how"""

    input: str | None = flag(None, ".jsonl or .txt file, or a folder of such files (.json, too)")
    json_keys: tuple[str, ...] | None = flag(
        None, "keys of a line that hold text, a dataset for each (default text)", count="+"
    )
    output_prefix: str | None = flag(None, "beginning of the names of the files to write")
    append_eod: bool = flag(False, "end every document with the end-of-document token")
    workers: int = flag(os.cpu_count() or 1, "processes that tokenize", minimum=1)
    log_interval: int = flag(1000, "documents between two lines of progress", minimum=1)
    dataset_impl: str = flag("mmap", "the format; there is one", choices=("mmap",))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, one dataset each."""
        return self.json_keys or ("text",)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker must know."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Lines of a JSON file from `first_line` (from 1) on, or with first_line 0 a whole text."""

    path: Path
    first_line: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """A chunk as tokens: for each key the ids, one document after another, and their lengths."""

    datasets: tuple[tuple[np.ndarray, tuple[int, ...]], ...]
    num_bytes: int
    num_blank: int


class Progress:
    """Counts what is done and says it every `interval` documents, on standard error."""

    def __init__(self, interval: int, total_bytes: int):
        self.interval, self.total_bytes = interval, total_bytes
        self.documents = self.tokens = self.num_bytes = self.blank = 0
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return max(time.monotonic() - self.start, 1e-9)

    def add(self, encoded: Encoded) -> None:
        """Count a chunk that was written."""
        lines_before = self.documents // self.interval
        self.documents += len(encoded.datasets[0][1])
        self.tokens += sum(len(ids) for ids, _ in encoded.datasets)
        self.num_bytes += encoded.num_bytes
        self.blank += encoded.num_blank
        if self.documents // self.interval > lines_before:
            print(
                f"{self.documents} documents, {self.num_bytes / 1e6:.1f} of "
                f"{self.total_bytes / 1e6:.1f} MB, {self.tokens} tokens ({self.rate()})",
                file=sys.stderr,
                flush=True,
            )

    def rate(self) -> str:
        """Documents, megabytes and tokens per second so far."""
        return (
            f"{self.documents / self.seconds:.1f} documents/s, "
            f"{self.num_bytes / 1e6 / self.seconds:.2f} MB/s, "
            f"{self.tokens / self.seconds:.0f} tokens/s"
        )


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    signal.signal(signal.SIGTERM, _stop)
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (PreprocessConfig, TokenizerConfig), ()))
        return 0
    try:
        preprocess(*_configurations(argv))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Tokenize the input into one dataset for each key; InputError names file and line."""
    files = input_files(config)
    tokenizer = _tokenizer(tokenizer_config)
    job = Job(tokenizer=tokenizer_config, keys=config.keys, append_eod=config.append_eod)
    progress = Progress(config.log_interval, sum(path.stat().st_size for path in files))
    prefixes = [f"{config.output_prefix}_{key}_document" for key in config.keys]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, tokenizer.vocab_size))
            for prefix in prefixes
        ]
        done = stack.enter_context(closing(encoded_chunks(job, chunks(files), config.workers)))
        for encoded in done:
            for writer, (ids, lengths) in zip(writers, encoded.datasets, strict=True):
                _write(writer, ids, lengths)
            progress.add(encoded)
        if not progress.tokens:
            raise InputError(f"--input {config.input}: there is no text in it")
    if progress.blank:
        print(f"{progress.blank} blank lines skipped")
    print(f"{progress.documents} documents, {progress.tokens} tokens ({progress.rate()})")
    for prefix in prefixes:
        print(f"wrote {prefix}.bin and {prefix}.idx")


def input_files(config: PreprocessConfig) -> list[Path]:
    """The files that --input means, those of a folder in the order of their names."""
    if not config.input or not config.output_prefix:
        raise InputError("give --input FILE|FOLDER and --output-prefix PREFIX; see --help")
    if len(set(config.keys)) < len(config.keys):
        raise InputError(f"--json-keys {' '.join(config.keys)}: a key is given twice")
    path = Path(config.input)
    if not path.exists():
        raise InputError(f"--input {path}: no such file or folder")
    wanted = (WHOLE, *LINES)
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if file.suffix in wanted]
    if not files:
        what = "no file in it is" if path.is_dir() else "it is not"
        raise InputError(f"--input {path}: {what} one of {', '.join(wanted)}")
    if len(config.keys) > 1 and any(file.suffix == WHOLE for file in files):
        raise InputError(f"--json-keys {' '.join(config.keys)}: a {WHOLE} file has one text only")
    return files


def chunks(files: Iterable[Path]) -> Iterator[Chunk]:
    """The content of the files, in order, in pieces of a few hundred kilobytes."""
    for path in files:
        if path.suffix == WHOLE:
            yield Chunk(path=path, first_line=0, lines=(path.read_bytes(),))
            continue
        with open(path, "rb") as file:
            first = 1
            while lines := tuple(file.readlines(CHUNK_BYTES)):
                yield Chunk(path=path, first_line=first, lines=lines)
                first += len(lines)


def encoded_chunks(job: Job, pieces: Iterable[Chunk], workers: int) -> Iterator[Encoded]:
    """`encode` of each chunk in order, by so many processes; with one, in this process."""
    if workers == 1:
        yield from (encode(job, piece) for piece in pieces)
        return
    pool = ProcessPoolExecutor(workers, initializer=_ignore_interrupts)
    waiting = deque()
    try:
        for piece in pieces:
            waiting.append(pool.submit(encode, job, piece))
            if len(waiting) >= CHUNKS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process was killed, perhaps for want of memory; try fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(job: Job, chunk: Chunk) -> Encoded:
    """Tokenize the documents of a chunk."""
    tokenizer = _tokenizer(job.tokenizer)
    end = [tokenizer.eod] if job.append_eod else []
    datasets = [([], []) for _ in job.keys]
    blank = 0
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        where = f"{chunk.path}, line {number}" if number else f"{chunk.path}"
        if number and not line.strip():
            blank += 1
            continue
        texts = _texts(line, job.keys, where) if number else [_decoded(line, where)]
        for text, (ids, lengths) in zip(texts, datasets, strict=True):
            tokens = _encoded(tokenizer, text, where)
            tokens += end if tokens else []
            ids += tokens
            lengths.append(len(tokens))
    return Encoded(
        datasets=tuple((np.array(ids, dtype=np.int32), tuple(sizes)) for ids, sizes in datasets),
        num_bytes=sum(map(len, chunk.lines)),
        num_blank=blank,
    )


def _configurations(argv: Sequence[str]) -> tuple[PreprocessConfig, TokenizerConfig]:
    typed = read(argv, vocabulary((PreprocessConfig, TokenizerConfig), ()))
    values = {name: assignment.value for name, assignment in typed.items()}
    own = {name: values.pop(name) for name in PreprocessConfig.__dataclass_fields__.keys() & values}
    return PreprocessConfig(**own), TokenizerConfig(**values)


@functools.cache
def _tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, made once in each process."""
    return build_tokenizer(config)


def _write(writer: IndexedDatasetWriter, ids: np.ndarray, lengths: Sequence[int]) -> None:
    """Append documents; one without tokens has no sequence, as in Megatron."""
    start = 0
    for length in lengths:
        if length:
            writer.add_item(ids[start : start + length])
        writer.end_document()
        start += length


def _texts(line: bytes, keys: Sequence[str], where: str) -> list[str]:
    try:
        document = json.loads(_decoded(line, where))
    except (json.JSONDecodeError, RecursionError) as error:
        shown = line[:SHOWN].decode(errors="replace").rstrip()
        raise InputError(f"{where}: not JSON ({error}): {shown}") from error
    if not isinstance(document, dict):
        raise InputError(f"{where}: expected a JSON object, got {_shortened(document)}")
    return [_text(document, key, where) for key in keys]


def _text(document: dict[str, Any], key: str, where: str) -> str:
    if key not in document:
        found = ", ".join(map(repr, document)) or "none"
        raise InputError(f"{where}: no key {key!r} (its keys: {found}); see --json-keys")
    text = document[key]
    if not isinstance(text, str):
        raise InputError(f"{where}: {key!r} holds {_shortened(text)}, expected a string")
    return text


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error.reason}, byte {error.start})") from error


def _encoded(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        text.encode("utf-8")  # JSON can spell half a character; no tokenizer has an id for it
        return tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: half of a surrogate pair, {text[error.start]!r}, at character {error.start}"
        ) from error
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the main process, and end at once when terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
