"""The default corpus: the source files of the Python standard library, docstrings included.

Each source file is one document. Documents are ordered by a hash of their path, which is the same
on every machine, so that a contiguous `--split` holds out whole documents at random. A byte-level
BPE is trained on the documents that are not held out. Tokens, index and tokenizer are in one folder
of the cache, whose name depends on the Python version, the content and the settings, so that they
are never out of date.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.data.split import parse_split, sequence_range
from megatron_zpp.tokenizer.base import END_OF_DOCUMENT
from megatron_zpp.tokenizer.hugging_face import HFTokenizer
from zeropp.atomic import sync_folder, write_atomically
from zeropp.errors import InputError

SPLIT = "95,5"  # documents for training and for validation
SEED = 3  # for the order; on Python 3.10 to 3.13, 5% of the files are then 5% of the text
VOCAB_SIZE = 8192  # including end of document
FORMAT = 1  # part of the cache's key: increment it if the same settings give other files
# Third-party packages, compiled files, tests, and generated tables (one is 7% of all text).
EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)
MACHINE_DEPENDENT = ("_sysconfigdata", "config-")  # prefixes of files and folders
BATCH = 64  # documents that are encoded at once
MANIFEST, PREFIX, TOKENIZER = "corpus.json", "text_document", "tokenizer.json"

logger = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files and the size of the corpus.

    `prefix` is the dataset's, and `split` the `--split` for which the tokenizer was trained.
    """

    prefix: Path
    tokenizer: Path
    split: str
    num_documents: int
    num_bytes: int
    num_tokens: int


def load_standard_library(
    cache: Path | str, *, source: Path | None = None, vocab_size: int = VOCAB_SIZE
) -> Corpus:
    """Return the corpus in `cache`, after building it if it is missing.

    Call it on one rank and share the result. `source` is the folder of the library, by default that
    of the running Python. Raises InputError if there are no sources or the cache cannot be used.
    """
    source = source or Path(sysconfig.get_path("stdlib"))
    texts = _read_source_files(source)
    settings = {"format": FORMAT, "seed": SEED, "split": SPLIT, "vocab_size": vocab_size}
    key = _digest(texts, settings)
    folder = Path(cache) / f"stdlib-{platform.python_version()}-{key[:12]}"
    try:
        if not folder.exists():
            _build(folder, list(texts.values()), vocab_size)
        return _load(folder)
    except OSError as error:
        raise InputError(
            f"cannot keep the default corpus in {cache}: {error.strerror or error}; give another "
            "folder with --data-cache-path, or your own data with --data-path"
        ) from error


def train_tokenizer(texts: Iterator[str] | Sequence[str], vocab_size: int) -> Model:
    """Train a byte-level BPE of at most `vocab_size` entries; the result is deterministic."""
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


def _read_source_files(source: Path) -> dict[str, str]:
    """Return the text of each source file, by its path relative to `source`, with slashes.

    The order is that of the hashes of the paths.
    """
    texts, num_undecodable = {}, 0
    for path in _source_paths(source):
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            num_undecodable += 1
            continue
        if text.strip():
            texts[path.relative_to(source).as_posix()] = text
    if num_undecodable:
        logger.info("default corpus: %d files of %s skipped, not UTF-8", num_undecodable, source)
    if not _validation_range(len(texts)):
        raise InputError(
            f"no default corpus: {len(texts)} Python sources in {source}; give your own data "
            "with --data-path"
        )

    def digest(path: str) -> str:
        return hashlib.sha256(f"{SEED}:{path}".encode()).hexdigest()

    return {path: texts[path] for path in sorted(texts, key=digest)}


def _source_paths(source: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if _is_included(name)]
        for name in names:
            if name.endswith(".py") and _is_included(name):
                yield Path(folder, name)


def _is_included(name: str) -> bool:
    return name not in EXCLUDED and not name.startswith(MACHINE_DEPENDENT)


def _digest(texts: Mapping[str, str], settings: dict[str, int | str]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path_and_text in texts.items():
        for part in path_and_text:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _validation_range(num_documents: int) -> range:
    """Return the documents that are held out for validation."""
    _, bounds, _ = parse_split(SPLIT)
    assert bounds is not None
    return sequence_range(bounds, num_documents)


def _build(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    """Build a temporary folder and rename it to `folder`, unless another process was faster."""
    start = time.monotonic()
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write_corpus(temporary, texts, vocab_size)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    logger.info("default corpus: built in %.1f s", time.monotonic() - start)


def _write_corpus(folder: Path, texts: Sequence[str], vocab_size: int) -> None:
    """Train the tokenizer, and write it with the dataset and the manifest."""
    num_bytes = sum(len(text.encode()) for text in texts)
    training_texts = texts[: _validation_range(len(texts)).start]
    logger.info(
        "default corpus: %d files of the Python %s standard library, %.1f MB",
        *(len(texts), platform.python_version(), num_bytes / 1e6),
    )
    logger.info(
        "default corpus: training a tokenizer of %d entries on %d of them",
        *(vocab_size, len(training_texts)),
    )
    model = train_tokenizer(training_texts, vocab_size)
    write_atomically(folder / TOKENIZER, model.to_str(pretty=True))
    tokenizer = HFTokenizer(str(folder))
    documents = _encoded(texts, tokenizer)
    num_tokens = write_dataset(folder / PREFIX, tokenizer.vocab_size, documents)
    corpus = {
        "split": SPLIT,
        "num_documents": len(texts),
        "num_bytes": num_bytes,
        "num_tokens": num_tokens,
    }
    manifest = {"corpus": corpus, "file_bytes": _file_sizes(folder)}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))


def _encoded(texts: Sequence[str], tokenizer: HFTokenizer) -> Iterator[list[list[int]]]:
    """Yield each text as a document of one sequence, with end of document."""
    num_tokens = 0
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        for ids in tokenizer.encode_batch(batch):
            num_tokens += len(ids) + 1
            yield [[*ids, tokenizer.eod]]
        if start // BATCH % 4 == 3 or start + BATCH >= len(texts):
            logger.info(
                "default corpus: %d of %d files encoded, %d tokens",
                *(start + len(batch), len(texts), num_tokens),
            )


def _file_sizes(folder: Path) -> dict[str, int]:
    names = (TOKENIZER, f"{PREFIX}.bin", f"{PREFIX}.idx")
    return {name: (folder / name).stat().st_size for name in names}


def _load(folder: Path) -> Corpus:
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["file_bytes"] != _file_sizes(folder):
        raise InputError(
            f"the default corpus in {folder} was changed ({manifest['file_bytes']} bytes expected, "
            f"{_file_sizes(folder)} found): delete that folder, it is then built again"
        )
    return Corpus(prefix=folder / PREFIX, tokenizer=folder / TOKENIZER, **manifest["corpus"])
