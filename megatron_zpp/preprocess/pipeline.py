"""Preprocess text from the beginning, or resume a stopped run of the same settings."""

import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_zpp.data.indexed_dataset import token_dtype
from megatron_zpp.preprocess.chunks import input_files, read_chunks
from megatron_zpp.preprocess.encoder import ChunkEncoder
from megatron_zpp.preprocess.partial_output import Journal, PartialOutput, Totals
from megatron_zpp.preprocess.preprocess_config import PreprocessConfig
from megatron_zpp.preprocess.worker_pool import WorkerDied, map_in_order
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.fast_gpt2 import FASTOKENS
from zeropp.errors import InputError

COMMIT_SECONDS = 10.0  # between two commits: the work that is lost if the process is killed


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Tokenize the input into one dataset for each key.

    Raises InputError, which names file and line, or OSError, and then leaves no files. Raises
    KeyboardInterrupt after one, which says what is kept; the same call then resumes the run.
    """
    config.check()
    files = input_files(config)
    encoder = ChunkEncoder(config=config, tokenizer_config=tokenizer_config)
    tokenizer = encoder.tokenizer
    if config.bpe_library == FASTOKENS and tokenizer.name != "GPT2BPETokenizer":
        raise InputError(f"--bpe-library {FASTOKENS} needs GPT2BPETokenizer, not {tokenizer.name}")
    settings = _journal_settings(config, files, tokenizer)
    folder = Path(f"{config.output_prefix}.partial")
    output = PartialOutput(folder, settings, len(config.keys))
    if not output.journal.complete:
        try:
            _write_datasets(encoder, files, output)
        except (WorkerDied, KeyboardInterrupt):
            if output.journal.totals.documents:
                output.close()
            else:
                output.remove()
            raise
        except BaseException:
            output.remove()
            raise
    output.move_to(config.prefixes)
    for prefix in config.prefixes:
        print(f"wrote {prefix}.bin and {prefix}.idx")


def _write_datasets(encoder: ChunkEncoder, files: Sequence[Path], output: PartialOutput) -> None:
    """Encode and write the input from the journal's position on, and complete the output."""
    config, journal = encoder.config, output.journal
    if journal.totals.documents:
        print(f"going on after {journal.totals.documents} documents ({output.folder})")
    file_sizes = [path.stat().st_size for path in files]
    bytes_before_file = dict(zip(files, accumulate(file_sizes, initial=0), strict=False))
    _ = encoder.fast_tokenizer  # so that forked workers inherit it
    num_workers = 0 if config.workers == 1 else config.workers
    chunks = read_chunks(files, config.keys, journal.position)
    progress = ProgressLines(config.log_interval, sum(file_sizes), journal)
    last_commit = time.monotonic()
    try:
        with closing(map_in_order(encoder, chunks, num_workers)) as encoded_chunks:
            for chunk, encoded in encoded_chunks:
                output.write(encoded.datasets)
                journal = Journal(
                    position=chunk.end,
                    totals=journal.totals.plus(encoded),
                    bytes_read=bytes_before_file[chunk.path] + chunk.bytes_read,
                    sizes=output.sizes,
                )
                progress.report(journal)
                if time.monotonic() - last_commit > COMMIT_SECONDS:
                    output.commit(journal)
                    last_commit = time.monotonic()
        if not journal.totals.tokens:
            raise InputError(f"--input {config.input}: there is no text in it")
        _print_summary(journal.totals, progress.rate(journal))
        output.complete(journal, token_dtype(encoder.tokenizer.vocab_size))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_commit_on_stop(output, journal)}") from None
    except WorkerDied as error:
        raise WorkerDied(f"{error}; {_commit_on_stop(output, journal)}") from error


def _commit_on_stop(output: PartialOutput, journal: Journal) -> str:
    """Commit if anything was written; return a sentence that says what is kept."""
    if not journal.totals.documents:
        return "nothing was written"
    output.commit(journal)
    return (
        f"{journal.totals.documents} documents are done and kept in {output.folder}: the same "
        "command goes on from there"
    )


def _print_summary(totals: Totals, rate: str) -> None:
    if totals.blank:
        print(f"{totals.blank} blank lines skipped")
    if totals.invalid:
        print(f"{totals.invalid} invalid documents skipped; the first: {totals.first_invalid}")
    print(f"{totals.documents} documents, {totals.tokens} tokens ({rate})")


def _journal_settings(
    config: PreprocessConfig, files: Sequence[Path], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return everything that decides which bytes are written, by the names of the flags."""
    file_states = hashlib.sha256()
    for path in files:
        file_states.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return {
        "--input (or its files changed)": file_states.hexdigest(),
        "--json-keys": config.keys,
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size],
        "--append-eod": config.append_eod,
        "--split-sentences": [config.split_sentences, config.keep_newlines],
        "--skip-invalid": config.skip_invalid,
    }


class ProgressLines:
    """Print progress lines. Rates are those of this process, which continues from `initial`."""

    def __init__(self, interval: int, total_bytes: int, initial: Journal) -> None:
        self.interval, self.total_bytes, self._initial = interval, total_bytes, initial
        self._intervals_reported = initial.totals.documents // interval
        self._start_time = time.monotonic()

    def report(self, journal: Journal) -> None:
        """Print a line if another `interval` documents are done."""
        totals, num_bytes = journal.totals, journal.bytes_read
        intervals = totals.documents // self.interval
        if intervals == self._intervals_reported:
            return
        self._intervals_reported = intervals
        bytes_of_run = max(num_bytes - self._initial.bytes_read, 1)
        seconds_left = (self.total_bytes - num_bytes) * self._elapsed_seconds() / bytes_of_run
        print(
            f"{totals.documents} documents, {num_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} "
            f"MB, {totals.tokens} tokens ({self.rate(journal)}), "
            f"{timedelta(seconds=round(seconds_left))} left",
            file=sys.stderr,
            flush=True,
        )

    def rate(self, journal: Journal) -> str:
        """Return the documents, megabytes and tokens per second of this process."""
        seconds = self._elapsed_seconds()
        documents = journal.totals.documents - self._initial.totals.documents
        tokens = journal.totals.tokens - self._initial.totals.tokens
        num_bytes = journal.bytes_read - self._initial.bytes_read
        return (
            f"{documents / seconds:.1f} documents/s, "
            f"{num_bytes / 1e6 / seconds:.2f} MB/s, "
            f"{tokens / seconds:.0f} tokens/s"
        )

    def _elapsed_seconds(self) -> float:
        return max(time.monotonic() - self._start_time, 1e-9)
