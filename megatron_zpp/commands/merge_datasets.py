"""Merges indexed datasets into one, document after document, as Megatron's tool of this name.

    megatron-zpp merge --input parts --output-prefix data/corpus_text_document

`--input` names folders, whose pairs of .bin and .idx are taken in the order of their names, or
prefixes of single datasets. Tokens are copied unchanged, so all datasets must have the same token
type. Both output files appear when the merge is complete, or not at all.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_zpp.commands.run_command import run_command
from megatron_zpp.data.indexed_dataset import IndexedDataset, index_header
from megatron_zpp.settings.flag import Section, flag
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

USAGE = "usage: {program} --input FOLDER|PREFIX ... --output-prefix PREFIX"
COPY_BYTES = 1 << 24  # bytes copied at once


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Section):
    """What to merge, and into what"""

    input: tuple[str, ...] | None = flag(
        None, "folders of datasets, or prefixes of single ones", required=True
    )
    output_prefix: str | None = flag(
        None, "names of the two files to write, without .bin and .idx", required=True
    )


def main(argv: Sequence[str], program: str = "megatron-zpp merge") -> int:
    """Run the command; return the exit status."""
    usage = USAGE.format(program=program)
    return run_command(
        argv, usage, (MergeConfig,), _run, interrupted="stopped; nothing was written"
    )


def prefixes(inputs: Iterable[str]) -> list[str]:
    """The prefixes of the datasets in `inputs`; those of a folder in the order of their names.

    Raises InputError for a folder without a dataset.
    """
    datasets = []
    for name in inputs:
        if not Path(name).is_dir() or Path(f"{name}.idx").is_file():
            datasets.append(name)
            continue
        files = (path for path in Path(name).iterdir() if path.suffix in (".bin", ".idx"))
        pairs = sorted({str(path.with_suffix("")) for path in files if path.name[0] != "."})
        if not pairs:
            raise InputError(f"--input {name}: there is no pair of .bin and .idx in this folder")
        datasets += pairs
    return datasets


def merge(inputs: Sequence[str], output: str) -> None:
    """Write the documents of all `inputs` to `output`.bin and .idx.

    Raises InputError for a damaged dataset, and for datasets of different types.
    """
    datasets = [IndexedDataset(prefix) for prefix in inputs]
    _check(datasets, output)
    idx_path, bin_path = Path(f"{output}.idx"), Path(f"{output}.bin")
    bin_path.parent.mkdir(parents=True, exist_ok=True)

    def write_tokens(file: BinaryIO) -> None:
        for dataset in datasets:
            with open(dataset.bin_path, "rb") as part:
                shutil.copyfileobj(part, file, COPY_BYTES)
        file.flush()
        os.fsync(file.fileno())
        # Before the new .bin appears, which must never be read with an old .idx.
        idx_path.unlink(missing_ok=True)

    write_atomically(bin_path, write_tokens)
    write_atomically(idx_path, lambda file: file.writelines(_index(datasets)))
    sequences, documents = _total_counts(datasets)
    print(f"wrote {output}.bin and .idx: {documents} documents, {sequences} sequences")


def _run(config: MergeConfig) -> None:
    merge(prefixes(config.input), config.output_prefix)


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
    """The bytes of the .idx in pieces: each dataset's offsets start where the one before ended."""
    sequences, documents = _total_counts(datasets)
    yield index_header(datasets[0].dtype, sequences, documents + 1)
    for dataset in datasets:
        yield dataset.lengths.tobytes()
    first_byte = 0
    for dataset in datasets:
        yield (dataset.pointers + np.int64(first_byte)).tobytes()
        first_byte += dataset.bin_path.stat().st_size
    yield np.zeros(1, dtype="<i8").tobytes()
    first_sequence = 0
    for dataset in datasets:
        yield (dataset.document_index[1:] + np.int64(first_sequence)).tobytes()
        first_sequence += len(dataset)
    for dataset in datasets:
        yield b"" if dataset.modes is None else dataset.modes.tobytes()


def _total_counts(datasets: Sequence[IndexedDataset]) -> tuple[int, int]:
    """The numbers of sequences and of documents of all datasets together."""
    sequences = sum(len(dataset) for dataset in datasets)
    documents = sum(len(dataset.document_index) - 1 for dataset in datasets)
    return sequences, documents
