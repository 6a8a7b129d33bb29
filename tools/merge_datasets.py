"""Several indexed datasets into one, document after document, as Megatron's tool of this name.

    python tools/merge_datasets.py --input parts --output-prefix data/corpus_text_document

takes all pairs of .bin and .idx in a folder in the order of their names, or the prefixes that are
listed, in that order. Tokens are copied as they are: datasets of different types of tokens do not
merge. Both files appear when all is done, or not at all.
"""

import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.data.indexed_dataset import IndexedDataset, index_header  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from zeropp.atomic import sync_folder, write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = "usage: python tools/merge_datasets.py --input FOLDER|PREFIX ... --output-prefix PREFIX"
COPIED = 1 << 24  # bytes at once


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Section):
    """What to merge, and into what"""

    input: tuple[str, ...] | None = flag(
        None, "folders of datasets, or prefixes of single ones"
    )
    output_prefix: str | None = flag(None, "beginning of the names of the two files to write")


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if any(word in HELP for word in argv):
        print(help_text(USAGE, (MergeConfig,)))
        return 0
    try:
        typed = read(argv, vocabulary((MergeConfig,)))
        config = MergeConfig(**{name: given.value for name, given in typed.items()})
        if not config.input or not config.output_prefix:
            raise InputError("give --input FOLDER|PREFIX ... and --output-prefix PREFIX")
        merge(prefixes(config.input), config.output_prefix)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def prefixes(inputs: Iterable[str]) -> list[str]:
    """The datasets that --input means; those of a folder in the order of their names."""
    found = []
    for name in inputs:
        if not Path(name).is_dir() or Path(f"{name}.idx").is_file():
            found.append(name)
            continue
        files = (path for path in Path(name).iterdir() if path.suffix in (".bin", ".idx"))
        pairs = sorted({str(path.with_suffix("")) for path in files if path.name[0] != "."})
        if not pairs:
            raise InputError(f"--input {name}: there is no pair of .bin and .idx in this folder")
        found += pairs
    return found


def merge(inputs: Sequence[str], output: str) -> None:
    """Write the documents of all `inputs` to `output`.bin and .idx.

    Raises InputError for a damaged dataset, and for datasets that do not fit together.
    """
    datasets = [IndexedDataset(prefix) for prefix in inputs]
    _check(datasets, output)
    idx_path, bin_path = Path(f"{output}.idx"), Path(f"{output}.bin")
    bin_path.parent.mkdir(parents=True, exist_ok=True)
    aside = bin_path.with_name(f".{bin_path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            for dataset in datasets:
                with open(dataset.bin_path, "rb") as part:
                    shutil.copyfileobj(part, file, COPIED)
            file.flush()
            os.fsync(file.fileno())
        # Without an index there is no dataset: a new .bin never meets an old .idx.
        idx_path.unlink(missing_ok=True)
        os.replace(aside, bin_path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(bin_path.parent)
    write_atomically(idx_path, lambda file: file.writelines(_index(datasets)))
    sequences, documents = (sum(counts) for counts in zip(*map(_counts, datasets), strict=True))
    print(f"wrote {output}.bin and .idx: {documents} documents, {sequences} sequences")


def _check(datasets: Sequence[IndexedDataset], output: str) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise InputError(
                f"{first.prefix} has tokens of type {first.dtype.name} and {dataset.prefix} of "
                f"type {dataset.dtype.name}: preprocess both with the same tokenizer"
            )
        if (dataset.modes is None) != (first.modes is None):
            with_modes, without = (first, dataset) if dataset.modes is None else (dataset, first)
            raise InputError(
                f"{with_modes.prefix} has a mode for each sequence and {without.prefix} has none: "
                "merge datasets of one kind"
            )
        if Path(f"{output}.bin").resolve() == dataset.bin_path.resolve():
            raise InputError(f"--output-prefix {output} is one of the datasets to merge")


def _index(datasets: Sequence[IndexedDataset]) -> Iterator[bytes]:
    """The .idx in pieces: numbers of sequences and bytes go on where the dataset before ended."""
    sequences, documents = (sum(counts) for counts in zip(*map(_counts, datasets), strict=True))
    yield index_header(datasets[0].dtype, sequences, documents + 1)
    for dataset in datasets:
        yield dataset.lengths.tobytes()
    start = 0
    for dataset in datasets:
        yield (dataset.pointers + np.int64(start)).tobytes()
        start += dataset.bin_path.stat().st_size
    yield np.zeros(1, dtype="<i8").tobytes()
    start = 0
    for dataset in datasets:
        yield (dataset.document_index[1:] + np.int64(start)).tobytes()
        start += len(dataset)
    for dataset in datasets:
        yield b"" if dataset.modes is None else dataset.modes.tobytes()


def _counts(dataset: IndexedDataset) -> tuple[int, int]:
    """Sequences and documents."""
    return len(dataset), len(dataset.document_index) - 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
