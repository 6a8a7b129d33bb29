"""Preprocess from the beginning, or from where a stopped run of the same settings came to."""

import functools
import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_zpp.data.indexed_dataset import token_dtype
from megatron_zpp.preprocess.chunks import chunks, input_files
from megatron_zpp.preprocess.encode import Job, encode, prepare, tokenizer_of
from megatron_zpp.preprocess.flags import PreprocessConfig
from megatron_zpp.preprocess.partial import Journal, Partial
from megatron_zpp.preprocess.pool import WorkerDied, in_order
from megatron_zpp.preprocess.rate import Count, Progress
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.fast_gpt2 import NAME
from zeropp.errors import InputError

COMMIT_SECONDS = 10.0  # what a kill can cost


class Stopped(Exception):
    """The run was stopped by a signal; the message says what is kept."""


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Tokenize the input into one dataset for each key.

    Raises InputError naming file and line, and OSError; nothing is left then. Raises Stopped after
    a KeyboardInterrupt; what is done is kept then, and the same call goes on from there.
    """
    config.check()
    files = input_files(config)
    tokenizer = tokenizer_of(tokenizer_config)
    if config.bpe_library == NAME and tokenizer.name != "GPT2BPETokenizer":
        raise InputError(f"--bpe-library {NAME} needs GPT2BPETokenizer, not {tokenizer.name}")
    settings = _settings(config, files, tokenizer)
    folder = Path(f"{config.output_prefix}.partial")
    partial = Partial(folder, settings, len(config.keys))
    if not partial.journal.complete:
        try:
            _write_all(config, tokenizer_config, files, partial)
        except (Stopped, WorkerDied, KeyboardInterrupt):
            if partial.journal.count.documents:
                partial.close()
            else:
                partial.remove()
            raise
        except BaseException:
            partial.remove()
            raise
    partial.place(config.prefixes)
    for prefix in config.prefixes:
        print(f"wrote {prefix}.bin and {prefix}.idx")


def _write_all(
    config: PreprocessConfig, tokenizer: TokenizerConfig, files: Sequence[Path], partial: Partial
) -> None:
    """Encode and write what is not done yet, and complete the files."""
    journal = partial.journal
    if journal.count.documents:
        print(f"going on after {journal.count.documents} documents ({partial.folder})")
    starts = dict(zip(files, accumulate(_sizes(files), initial=0), strict=False))
    job = Job(
        tokenizer=tokenizer, library=config.bpe_library, keys=config.keys,
        append_eod=config.append_eod, split_sentences=config.split_sentences,
        keep_newlines=config.keep_newlines, skip_invalid=config.skip_invalid,
    )  # fmt: skip
    prepare(job)
    workers = 0 if config.workers == 1 else config.workers
    given = chunks(files, config.keys, journal.place)
    progress = Progress(config.log_interval, sum(_sizes(files)), journal.count, journal.read)
    last_commit = time.monotonic()
    try:
        with closing(in_order(functools.partial(encode, job), given, workers)) as done:
            for chunk, result in done:
                partial.write(result.datasets)
                journal = Journal(
                    place=chunk.end, count=journal.count.plus(result),
                    read=starts[chunk.path] + chunk.read, sizes=partial.sizes,
                )  # fmt: skip
                progress.say(journal.count, journal.read)
                if time.monotonic() - last_commit > COMMIT_SECONDS:
                    partial.commit(journal)
                    last_commit = time.monotonic()
        if not journal.count.tokens:
            raise InputError(f"--input {config.input}: there is no text in it")
        _summary(journal.count, progress.rate(journal.count, journal.read))
        partial.complete(journal, token_dtype(tokenizer_of(tokenizer).vocab_size))
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {_keep(partial, journal)}") from None
    except WorkerDied as error:
        raise WorkerDied(f"{error}; {_keep(partial, journal)}") from error


def _keep(partial: Partial, journal: Journal) -> str:
    if not journal.count.documents:
        return "nothing was written"
    partial.commit(journal)
    return (
        f"{journal.count.documents} documents are done and kept in {partial.folder}: the same "
        "command goes on from there"
    )


def _sizes(files: Sequence[Path]) -> list[int]:
    return [path.stat().st_size for path in files]


def _summary(count: Count, rate: str) -> None:
    if count.blank:
        print(f"{count.blank} blank lines skipped")
    if count.invalid:
        print(f"{count.invalid} invalid documents skipped; the first: {count.first_invalid}")
    print(f"{count.documents} documents, {count.tokens} tokens ({rate})")


def _settings(
    config: PreprocessConfig, files: Sequence[Path], tokenizer: Tokenizer
) -> dict[str, Any]:
    """What decides which bytes are written, by the names that a person knows."""
    states = hashlib.sha256()
    for path in files:
        states.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return {
        "--input (or its files changed)": states.hexdigest(),
        "--json-keys": config.keys,
        "tokenizer": [tokenizer.fingerprint, tokenizer.vocab_size],
        "--append-eod": config.append_eod,
        "--split-sentences": [config.split_sentences, config.keep_newlines],
        "--skip-invalid": config.skip_invalid,
    }
