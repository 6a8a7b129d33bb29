"""The default corpus: the Python standard library's own sources, docstrings included.

One source file is one document. Documents are ordered by a hash of their path, the same on every
machine, so that a contiguous `--split` holds out whole documents at random. A byte-level BPE is
trained on the documents that are not held out. Tokens, index and tokenizer lie in one folder of the
cache, named after the Python version, the content and the settings, so they never go stale.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import sysconfig
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_zpp.data.indexed_dataset import IndexedDatasetWriter
from megatron_zpp.data.split import parse_split, sequence_range
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT
from megatron_zpp.tokenizer.hugging_face import HFTokenizer
from zeropp.atomic import sync_folder, write_atomically
from zeropp.errors import InputError

SPLIT = "95,5"  # of the documents: training, held out for validation
SEED = 3  # of the order; on Python 3.10 to 3.13 the 5% of the files are 5% of the text as well
VOCAB_SIZE = 8192  # entries, end of document included
FORMAT = 1  # part of the cache's key: raise it when the same settings give other files
# Foreign packages, compiled files, tests, and generated tables (one of them 7% of everything).
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)
MACHINE_DEPENDENT = ("_sysconfigdata", "config-")  # beginnings of names of files and folders
BATCH = 64  # documents encoded at once
MANIFEST, PREFIX, TOKENIZER = "corpus.json", "text_document", "tokenizer.json"

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the corpus lies and how large it is; `split` is the `--split` it was made for."""

    prefix: Path
    tokenizer: Path
    split: str
    num_documents: int
    num_bytes: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file; `path` is relative to the library, with slashes."""

    path: str
    text: str


def standard_library(
    cache: Path | str, seed: int = SEED, *, source: Path | None = None, vocab_size: int = VOCAB_SIZE
) -> Corpus:
    """Build the corpus under `cache`, or find it there; call it on one rank and share the result.

    `seed` chooses the order of the documents, and with it which are held out. `source` is the
    library's folder, by default that of the running Python. Raises InputError if there are no
    sources or the cache cannot be used.
    """
    source = source or Path(sysconfig.get_path("stdlib"))
    documents = _read_documents(source, seed)
    settings = {"format": FORMAT, "seed": seed, "split": SPLIT, "vocab_size": vocab_size}
    key = _digest(documents, settings)
    folder = Path(cache) / f"stdlib-{platform.python_version()}-{key[:16]}"
    try:
        if not folder.exists():
            _build(folder, documents, vocab_size)
        return _load(folder)
    except OSError as error:
        raise InputError(
            f"cannot keep the default corpus in {cache}: {error.strerror or error}; give another "
            "folder with --data-cache-path, or your own data with --data-path"
        ) from error


def train_tokenizer(texts: Iterator[str] | Sequence[str], vocab_size: int) -> Model:
    """Byte-level BPE of at most `vocab_size` entries; the same texts always give the same one."""
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def _read_documents(source: Path, seed: int) -> list[Document]:
    documents, undecodable = [], 0
    for path in _source_files(source):
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            undecodable += 1
            continue
        if text.strip():
            documents.append(Document(path=path.relative_to(source).as_posix(), text=text))
    if undecodable:
        logger.info("default corpus: %d files of %s skipped, not UTF-8", undecodable, source)
    if not _held_out(len(documents)):
        raise InputError(
            f"no default corpus: {len(documents)} Python sources in {source}; give your own data "
            "with --data-path"
        )
    return sorted(documents, key=lambda document: _place(document.path, seed))


def _source_files(source: Path) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(source):
        subfolders[:] = [name for name in subfolders if _is_wanted(name)]
        yield from (
            Path(folder, name) for name in files if name.endswith(".py") and _is_wanted(name)
        )


def _is_wanted(name: str) -> bool:
    return name not in LEFT_OUT and not name.startswith(MACHINE_DEPENDENT)


def _place(path: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{path}".encode()).hexdigest()


def _digest(documents: Sequence[Document], settings: dict[str, int | str]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for document in documents:
        for part in (document.path, document.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _held_out(num_documents: int) -> range:
    validation = parse_split(SPLIT)[1]
    assert validation is not None
    return sequence_range(validation, num_documents)


def _build(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    """Make `folder` aside and rename it; whoever else makes it at the same time may win."""
    start = time.monotonic()
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    aside.mkdir(parents=True)
    try:
        _fill(aside, documents, vocab_size)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    logger.info("default corpus: built in %.1f s, kept in %s", time.monotonic() - start, folder)


def _fill(folder: Path, documents: Sequence[Document], vocab_size: int) -> None:
    num_bytes = sum(len(document.text.encode()) for document in documents)
    trained_on = documents[: _held_out(len(documents)).start]
    logger.info(
        "default corpus: %d files of the Python %s standard library, %.1f MB; training a tokenizer "
        "of %d entries on %d of them",
        len(documents),
        platform.python_version(),
        num_bytes / 1e6,
        vocab_size,
        len(trained_on),
    )
    model = train_tokenizer((document.text for document in trained_on), vocab_size)
    definition = model.to_str(pretty=True).encode()
    write_atomically(folder / TOKENIZER, lambda file: file.write(definition))
    num_tokens = _encode(folder, documents)
    corpus = {
        "split": SPLIT,
        "num_documents": len(documents),
        "num_bytes": num_bytes,
        "num_tokens": num_tokens,
    }
    manifest = {"corpus": corpus, "file_bytes": _sizes(folder)}
    text = json.dumps(manifest, indent=1).encode()
    write_atomically(folder / MANIFEST, lambda file: file.write(text))


def _encode(folder: Path, documents: Sequence[Document]) -> int:
    """Write the documents, an end after each; returns the number of tokens."""
    tokenizer = HFTokenizer(str(folder))
    num_tokens = 0
    with IndexedDatasetWriter(folder / PREFIX, tokenizer.vocab_size) as writer:
        for start in range(0, len(documents), BATCH):
            batch = documents[start : start + BATCH]
            for ids in tokenizer.encode_batch([document.text for document in batch]):
                writer.add_item([*ids, tokenizer.eod])
                writer.end_document()
                num_tokens += len(ids) + 1
            if start // BATCH % 4 == 3 or start + BATCH >= len(documents):
                logger.info(
                    "default corpus: %d of %d files encoded, %d tokens",
                    start + len(batch),
                    len(documents),
                    num_tokens,
                )
    return num_tokens


def _sizes(folder: Path) -> dict[str, int]:
    names = (TOKENIZER, f"{PREFIX}.bin", f"{PREFIX}.idx")
    return {name: (folder / name).stat().st_size for name in names}


def _load(folder: Path) -> Corpus:
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["file_bytes"] != _sizes(folder):
        raise InputError(
            f"the default corpus in {folder} was changed ({manifest['file_bytes']} bytes expected, "
            f"{_sizes(folder)} found): delete that folder, it is then built again"
        )
    return Corpus(prefix=folder / PREFIX, tokenizer=folder / TOKENIZER, **manifest["corpus"])
