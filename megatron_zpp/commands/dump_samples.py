"""Writes the samples that a run would train on to a file, or prints some of them as text.

    megatron-zpp dump-samples --data-path data/corpus_text_document --seq-length 1024 \\
        --train-samples 1000 --valid-samples 100 --test-samples 0 --output samples.npz \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

The data flags are those of `pretrain_gpt.py`. A split without a number of samples yields each of
its samples once. With `--output` all samples of each split are written, in the order in which
`--dataloader-type single` trains on them, as {train,valid,test}/tokens int32 [n, S + 1], loss_mask
float32 [n, S], position_ids int64 [n, S] and dataset_index int16 [n]. Without it the first few
samples are printed.
"""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
import torch

from megatron_zpp.commands.run_command import run_command
from megatron_zpp.data.blend import BlendedDataset
from megatron_zpp.data.gpt_dataset import GPTDataset, MockDataset, build_datasets
from megatron_zpp.data.loader import loss_mask, position_ids
from megatron_zpp.data.split import SPLITS, parse_split
from megatron_zpp.data.text_source import resolve_data
from megatron_zpp.settings.config import DataConfig, ModelConfig, TokenizerConfig, TrainingConfig
from megatron_zpp.settings.flag import Section, flag, shared
from megatron_zpp.settings.flags_without_effect import flags_without_effect
from megatron_zpp.tokenizer import Tokenizer
from zeropp.atomic import write_atomically
from zeropp.errors import InputError

USAGE = "usage: {program} --data-path PREFIX [--output FILE.npz] [flags]"
ROWS = 64  # samples read at once
EPOCH = "(default: one epoch)"
NO_EFFECT = MappingProxyType(
    {
        "num_workers": "samples are read by this process",
        "dataloader_type": "samples are written in the order of the dataset",
        "reset_attention_mask": "the attention mask follows from the tokens and is not written",
    }
)
IDLE = ("data-impl", "mmap-warmup", "no-mmap-bin-files")

Dataset = GPTDataset | BlendedDataset | MockDataset


@dataclass(frozen=True, kw_only=True)
class DumpConfig(Section):
    """Which samples, and where to write them"""

    seq_length: int = shared(ModelConfig, "seq_length")
    seed: int = shared(TrainingConfig, "seed")
    train_samples: int | None = flag(None, f"training samples {EPOCH}", minimum=0)
    valid_samples: int | None = flag(None, f"validation samples {EPOCH}", minimum=0)
    test_samples: int | None = flag(None, f"test samples {EPOCH}", minimum=0)
    output: str | None = flag(None, "the .npz file to write (default: print samples as text)")
    show: int = flag(3, "samples of each split to print", minimum=1)

    @property
    def sizes(self) -> tuple[int | None, int | None, int | None]:
        """Requested samples of each split; None: one epoch."""
        return self.train_samples, self.valid_samples, self.test_samples


def main(argv: Sequence[str], program: str = "megatron-zpp dump-samples") -> int:
    """Run the command; return the exit status."""
    return run_command(
        argv,
        USAGE.format(program=program),
        (DumpConfig, DataConfig, TokenizerConfig),
        dump,
        interrupted="stopped; nothing was written",
        no_effect=NO_EFFECT,
        idle=[flag for flag in flags_without_effect() if flag.name in IDLE],
    )


def dump(config: DumpConfig, data: DataConfig, tokenizer_config: TokenizerConfig) -> None:
    """Write or print the samples of all splits that have data.

    Raises InputError for data that cannot be read and for a file that cannot be written.
    """
    data, tokenizer = resolve_data(data, tokenizer_config)
    if data.mock_data and None in config.sizes:
        raise InputError(
            "--mock-data has no end: give --train-samples, --valid-samples and --test-samples"
        )
    datasets = build_datasets(
        data,
        config.seq_length,
        config.sizes,
        config.seed,
        tokenizer.vocab_size,
        cache_required=False,  # reading works in a folder without write access
    )
    splits = {
        split: dataset
        for split, dataset, has_data in zip(SPLITS, datasets, _splits_with_data(data), strict=True)
        if has_data
    }
    if config.output is None:
        for split, dataset in splits.items():
            show(split, dataset, tokenizer, config)
        return
    path = Path(config.output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, lambda file: write(file, splits, data, tokenizer.eod, config.seq_length)
        )
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}): "
            "give an --output file where there is space and write access"
        ) from error
    counts = ", ".join(f"{split} {_length(dataset)}" for split, dataset in splits.items())
    print(f"wrote {path}: {counts} samples of {config.seq_length} + 1 tokens")


def write(
    file: BinaryIO,
    splits: dict[str, Dataset | None],
    data: DataConfig,
    eod: int,
    seq_length: int,
) -> None:
    """Write all samples as an .npz.

    Memory holds ROWS samples at a time; the samples are read again for each array.
    """

    def to_loss_mask(rows: np.ndarray) -> np.ndarray:
        return loss_mask(torch.from_numpy(rows[:, :-1]), eod, data.eod_mask_loss).numpy()

    def to_position_ids(rows: np.ndarray) -> np.ndarray:
        return position_ids(torch.from_numpy(rows[:, :-1]), eod, data.reset_position_ids).numpy()

    arrays: tuple[tuple[str, str, int, Callable[[np.ndarray], np.ndarray]], ...] = (
        ("tokens", "<i4", seq_length + 1, lambda rows: rows),
        ("loss_mask", "<f4", seq_length, to_loss_mask),
        ("position_ids", "<i8", seq_length, to_position_ids),
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for split, dataset in splits.items():
            for name, dtype, width, from_tokens in arrays:
                shape = (_length(dataset), width)
                chunks = (from_tokens(rows) for rows in token_rows(dataset))
                _write_array(archive, f"{split}/{name}", dtype, shape, chunks)
            index = dataset_index(dataset)
            _write_array(archive, f"{split}/dataset_index", "<i2", index.shape, [index])


def token_rows(dataset: Dataset | None) -> Iterator[np.ndarray]:
    """The tokens of all samples in order, in arrays int64 [at most ROWS, S + 1]."""
    for start in range(0, _length(dataset), ROWS):
        stop = min(start + ROWS, len(dataset))
        yield np.stack([dataset[number]["tokens"] for number in range(start, stop)])


def dataset_index(dataset: Dataset | None) -> np.ndarray:
    """The dataset of the blend that each sample is from, int16 [n]; 0 without a blend."""
    if isinstance(dataset, BlendedDataset):
        return dataset.dataset_index
    return np.zeros(_length(dataset), dtype=np.int16)


def show(split: str, dataset: Dataset | None, tokenizer: Tokenizer, config: DumpConfig) -> None:
    """Print the first samples as text, each piece of a document below a line that names it."""
    for number in range(min(config.show, _length(dataset))):
        print(f"=== {split} sample {number} of {len(dataset)}")
        tokens = dataset[number]["tokens"]
        for title, start, stop in pieces(dataset, number, len(tokens)):
            print(f"--- {title}")
            print(tokenizer.decode(tokens[start:stop].tolist()))


def pieces(dataset: Dataset, number: int, length: int) -> Iterator[tuple[str, int, int]]:
    """(title, start, stop) of each document's piece of a sample of `length` tokens."""
    if isinstance(dataset, BlendedDataset):
        blended = dataset
        dataset = blended.datasets[int(blended.dataset_index[number])]
        number = int(blended.dataset_sample_index[number])
    if isinstance(dataset, MockDataset):
        yield "made-up tokens", 0, length
        return
    source, start = dataset.source, 0
    for sequence, offset, count in dataset.spans(number):
        if not count:
            continue
        document = int(np.searchsorted(source.document_index, sequence, side="right")) - 1
        length_of_sequence = int(source.lengths[sequence])
        title = f"{source.prefix}, document {document}"
        if source.document_index[document + 1] - source.document_index[document] > 1:
            title += f", sequence {sequence - int(source.document_index[document])}"
        title += f", tokens {offset} to {offset + count - 1} of {length_of_sequence}"
        yield title, start, start + count
        start += count


def _splits_with_data(data: DataConfig) -> list[bool]:
    """Whether each split has a share of the data, or its own path."""
    if data.mock_data:
        return [True] * len(SPLITS)
    if data.data_path is not None:
        return [bounds is not None for bounds in parse_split(data.split)]
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return [path is not None for path in paths]


def _length(dataset: Dataset | None) -> int:
    return 0 if dataset is None else len(dataset)


def _write_array(
    archive: zipfile.ZipFile,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    chunks: Iterator[np.ndarray] | Sequence[np.ndarray],
) -> None:
    """Add an array to an .npz; `chunks` are its parts along the first dimension."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for chunk in chunks:
            member.write(np.ascontiguousarray(chunk, dtype=dtype).tobytes())
