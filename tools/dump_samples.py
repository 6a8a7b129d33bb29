"""What will the model see? The samples of a run, as arrays in one file or as text on the screen.

    python tools/dump_samples.py --data-path data/corpus_text_document --seq-length 1024 \\
        --train-samples 1000 --valid-samples 100 --test-samples 0 --output samples.npz \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

The data flags are those of `pretrain_gpt.py`. A split without a number of samples gives each of its
samples once. With --output all samples of each split are written, in the order in which training
takes them (--dataloader-type single), under the names {train,valid,test}/tokens int32 [n, S + 1],
loss_mask float32 [n, S], position_ids int64 [n, S] and dataset_index int16 [n]; without it the
first few are printed.
"""

import logging
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.data.blend import BlendedDataset  # noqa: E402
from megatron_zpp.data.gpt_dataset import GPTDataset, build_datasets  # noqa: E402
from megatron_zpp.data.masks import loss_mask, position_ids  # noqa: E402
from megatron_zpp.data.mock import MockDataset  # noqa: E402
from megatron_zpp.data.split import SPLITS, parse_split  # noqa: E402
from megatron_zpp.data.text_source import open_source  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.config import (  # noqa: E402
    DataConfig,
    ModelConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron_zpp.settings.flag import Section, flag, shared  # noqa: E402
from megatron_zpp.settings.ignored_flags import IgnoredFlags  # noqa: E402
from megatron_zpp.tokenizer import Tokenizer  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = "usage: python tools/dump_samples.py --data-path PREFIX [--output FILE.npz] [flags]"
ROWS = 64  # samples read at once
EPOCH = "(default: each one of an epoch)"
IDLE = MappingProxyType(
    {
        "num_workers": "the samples are read here, one after another",
        "dataloader_type": "the samples come in the order of the dataset",
        "reset_attention_mask": "the attention mask follows from tokens and is not written",
    }
)

Dataset = GPTDataset | BlendedDataset | MockDataset


@dataclass(frozen=True, kw_only=True)
class DumpConfig(Section):
    """Which samples, and where they go"""

    seq_length: int = shared(ModelConfig, "seq_length")
    seed: int = shared(TrainingConfig, "seed")
    train_samples: int | None = flag(None, f"training samples {EPOCH}", minimum=0)
    valid_samples: int | None = flag(None, f"validation samples {EPOCH}", minimum=0)
    test_samples: int | None = flag(None, f"test samples {EPOCH}", minimum=0)
    data_impl: str = shared(IgnoredFlags, "data_impl")
    mmap_warmup: bool = shared(IgnoredFlags, "mmap_warmup")
    no_mmap_bin_files: bool = shared(IgnoredFlags, "no_mmap_bin_files")
    output: str | None = flag(None, "the .npz file to write (default: print samples as text)")
    show: int = flag(3, "samples of each split to print", minimum=1)

    @property
    def sizes(self) -> tuple[int | None, int | None, int | None]:
        """How many samples each split is asked for."""
        return self.train_samples, self.valid_samples, self.test_samples


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sections = (DumpConfig, DataConfig, TokenizerConfig)
    if any(word in HELP for word in argv):
        print(help_text(USAGE, sections))
        return 0
    try:
        dump(*_configurations(argv, sections))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def dump(config: DumpConfig, data: DataConfig, tokenizer_config: TokenizerConfig) -> None:
    """Write or print the samples of all splits that there are."""
    data, tokenizer = open_source(data, tokenizer_config)
    if data.mock_data and None in config.sizes:
        raise InputError(
            "--mock-data never ends: give --train-samples, --valid-samples and --test-samples"
        )
    datasets = build_datasets(
        data,
        config.seq_length,
        config.sizes,
        config.seed,
        tokenizer.vocab_size,
        cache_required=False,  # who only looks may look at data that cannot be written
    )
    splits = {
        split: dataset
        for split, dataset, has_weight in zip(SPLITS, datasets, _weighty(data), strict=True)
        if has_weight
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
            "name a file with --output where there is room and write access"
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
    """All samples as an .npz; a few rows are in memory at a time, each array is read anew."""

    def masked(rows: np.ndarray) -> np.ndarray:
        return loss_mask(torch.from_numpy(rows[:, :-1]), eod, data.eod_mask_loss).numpy()

    def positioned(rows: np.ndarray) -> np.ndarray:
        return position_ids(torch.from_numpy(rows[:, :-1]), eod, data.reset_position_ids).numpy()

    kinds: tuple[tuple[str, str, int, Callable[[np.ndarray], np.ndarray]], ...] = (
        ("tokens", "<i4", seq_length + 1, lambda rows: rows),
        ("loss_mask", "<f4", seq_length, masked),
        ("position_ids", "<i8", seq_length, positioned),
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for split, dataset in splits.items():
            for name, dtype, width, made in kinds:
                shape = (_length(dataset), width)
                arrays = (made(rows) for rows in batches(dataset))
                _member(archive, f"{split}/{name}", dtype, shape, arrays)
            index = dataset_index(dataset)
            _member(archive, f"{split}/dataset_index", "<i2", index.shape, [index])


def batches(dataset: Dataset | None) -> Iterator[np.ndarray]:
    """The samples in order, int64 [up to ROWS, S + 1]."""
    for start in range(0, _length(dataset), ROWS):
        stop = min(start + ROWS, len(dataset))
        yield np.stack([dataset[number]["tokens"] for number in range(start, stop)])


def dataset_index(dataset: Dataset | None) -> np.ndarray:
    """Which dataset of a blend each sample is from, int16 [n]; 0 where there is only one."""
    if isinstance(dataset, BlendedDataset):
        return dataset.dataset_index
    return np.zeros(_length(dataset), dtype=np.int16)


def show(split: str, dataset: Dataset | None, tokenizer: Tokenizer, config: DumpConfig) -> None:
    """Print the first samples as text, each document of them under a line that says which."""
    for number in range(min(config.show, _length(dataset))):
        print(f"=== {split} sample {number} of {len(dataset)}")
        tokens = dataset[number]["tokens"]
        for title, start, stop in borders(dataset, number, len(tokens)):
            print(f"--- {title}")
            print(tokenizer.decode(tokens[start:stop].tolist()))


def borders(dataset: Dataset, number: int, length: int) -> Iterator[tuple[str, int, int]]:
    """(which document, start, stop) of the pieces of a sample of `length` tokens."""
    if isinstance(dataset, BlendedDataset):
        chosen = int(dataset.dataset_index[number])
        number = int(dataset.dataset_sample_index[number])
        dataset = dataset.datasets[chosen]
    if isinstance(dataset, MockDataset):
        yield "made-up tokens", 0, length
        return
    source, start = dataset.source, 0
    for sequence, offset, count in dataset.places(number):
        if not count:
            continue
        document = int(np.searchsorted(source.document_index, sequence, side="right")) - 1
        whole = int(source.lengths[sequence])
        title = f"{source.prefix}, document {document}"
        if source.document_index[document + 1] - source.document_index[document] > 1:
            title += f", sequence {sequence - int(source.document_index[document])}"
        yield f"{title}, tokens {offset} to {offset + count - 1} of {whole}", start, start + count
        start += count


def _weighty(data: DataConfig) -> list[bool]:
    """Whether each split has a weight, or a path of its own."""
    if data.mock_data:
        return [True] * len(SPLITS)
    if data.data_path is not None:
        return [bounds is not None for bounds in parse_split(data.split)]
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    return [path is not None for path in paths]


def _length(dataset: Dataset | None) -> int:
    return 0 if dataset is None else len(dataset)


def _member(
    archive: zipfile.ZipFile,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    arrays: Iterator[np.ndarray] | Sequence[np.ndarray],
) -> None:
    """Write one array, that comes in pieces along its first dim, into an .npz."""
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(member, header)
        for array in arrays:
            member.write(np.ascontiguousarray(array, dtype=dtype).tobytes())


def _configurations(
    argv: Sequence[str], sections: tuple[type[Section], ...]
) -> tuple[Section, ...]:
    assignments = read(argv, vocabulary(sections))
    for name, given in assignments.items():
        if reason := given.flag.why_ignored or IDLE.get(name):
            logging.warning("%s has no effect here: %s", given, reason)
    typed = {name: given.value for name, given in assignments.items()}
    made = [
        section(**{name: typed[name] for name in section.__dataclass_fields__.keys() & typed})
        for section in sections
    ]
    for section in made:
        section.check()
    return tuple(made)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
