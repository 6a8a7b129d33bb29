"""What is read: the tokenizer, the datasets, and how many samples make a step."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain

from megatron_zpp.settings.flag import Section, flags_in
from zeropp.errors import InputError
from zeropp.settings import Rule, one_of, requires

EXAMPLES_SUFFIX = ".jsonl"
_flag = flags_in(
    "data.toml",
    {
        "each split has its own source": lambda c: c.data.names_data and not c.data.is_divided,
        "--split divides the data": lambda c: not c.data.names_data or c.data.is_divided,
        "made-up samples need no index": lambda c: c.data.mock_data,
        "examples need no index": lambda c: names_examples(c.data),
    },
)

# The ways to name datasets. A run uses one of them.
SOURCES = (
    ("data_path",),
    ("train_data_path", "valid_data_path", "test_data_path"),
    ("data_args_path",),
    ("per_split_data_args_path",),
    tuple(
        f"{split}_weighted_split_paths{suffix}"
        for split in ("train", "valid", "test")
        for suffix in ("", "_path")
    ),
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """Which tokenizer, and where its files are (default: that of the data)."""

    tokenizer_type: str | None = _flag(None)
    vocab_file: str | None = _flag(None)
    merge_file: str | None = _flag(None)
    tokenizer_model: str | None = _flag(None)
    vocab_size: int | None = _flag(None)
    null_tokenizer_eod_id: int | None = _flag(None)
    tokenizer_hf_no_include_special_tokens: bool = _flag(False)
    vocab_extra_ids: int = _flag(0)

    @property
    def kind(self) -> str | None:
        """The type, which the two files of a byte-pair tokenizer imply as in Megatron, or None."""
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            return "GPT2BPETokenizer"
        return self.tokenizer_type


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Where samples come from; with no path at all, the Python standard library's own text."""

    data_path: tuple[str, ...] | None = _flag(None)
    train_data_path: tuple[str, ...] | None = _flag(None)
    valid_data_path: tuple[str, ...] | None = _flag(None)
    test_data_path: tuple[str, ...] | None = _flag(None)
    split_ranges: tuple[str, str, str] | None = _flag(None)
    data_args_path: str | None = _flag(None)
    per_split_data_args_path: str | None = _flag(None)
    train_weighted_split_paths: tuple[str, ...] | None = _flag(None)
    valid_weighted_split_paths: tuple[str, ...] | None = _flag(None)
    test_weighted_split_paths: tuple[str, ...] | None = _flag(None)
    train_weighted_split_paths_path: str | None = _flag(None)
    valid_weighted_split_paths_path: str | None = _flag(None)
    test_weighted_split_paths_path: str | None = _flag(None)
    split: str = _flag("969, 30, 1")
    data_cache_path: str | None = _flag(None)
    num_workers: int = _flag(2)
    dataloader_type: str = _flag("single")
    reset_position_ids: bool = _flag(False)
    reset_attention_mask: bool = _flag(False)
    eod_mask_loss: bool = _flag(False)
    mock_data: bool = _flag(False)
    skip_samples: tuple[str, ...] | None = _flag(None)

    rules = (
        *(
            one_of("mock_data", name, message="{} contradict: leave one out")
            for name in chain.from_iterable(SOURCES)
        ),
        *(
            one_of(name, f"{name}_path", message="{} contradict: give one of them")
            for name in SOURCES[-1]
            if not name.endswith("_path")
        ),
    )

    @property
    def skipped(self) -> tuple[range, ...]:
        """The ranges of `--skip-samples`."""
        bounds = (text.split(":") for text in self.skip_samples or ())
        return tuple(range(int(first), int(end)) for first, end in bounds)

    @property
    def ranges(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each split, the shares between which it takes the documents of its own datasets.

        They are one pair for all datasets, or one for each.
        """
        texts = self.split_ranges or ("0:1",) * 3
        return tuple(tuple(map(range_of_documents, text.split(","))) for text in texts)

    def check(self) -> None:
        """Raise InputError for sources that exclude each other and for what is not built yet."""
        super().check()
        if self.split_ranges is not None:
            words = f"--split-ranges {' '.join(self.split_ranges)}"
            if names_examples(self):
                raise InputError(f"{words}: examples have no ranges; leave it out")
            for text in self.split_ranges:
                if None in map(range_of_documents, text.split(",")):
                    raise InputError(
                        f"{words}: {text} is no FROM:TO with 0 <= FROM < TO <= 1, as in 0:0.95"
                    )
        for text in self.skip_samples or ():
            numbers = re.fullmatch(r"([0-9]+):([0-9]+)", text)
            if numbers is None or int(numbers[1]) >= int(numbers[2]):
                raise InputError(
                    f"--skip-samples {text}: expected A:B with A < B, for the samples A to B-1 in "
                    "the order of the run, counted from 0"
                )
        sources = [flags for flags in map(self._typed, SOURCES) if flags]
        if len(sources) > 1:
            raise InputError(
                f"{sources[0][0]} and {sources[1][0]} contradict: give one blend that --split "
                "divides, or one blend for each split"
            )

    def _typed(self, names: Iterable[str]) -> list[str]:
        """The flags among the fields of these names that have a value."""
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]

    @property
    def is_divided(self) -> bool:
        """Whether --split divides one source of data."""
        return bool(self.data_path or self.data_args_path)

    @property
    def names_data(self) -> bool:
        """Whether any flag names a dataset or made-up samples."""
        return self.mock_data or any(map(self._typed, SOURCES))


@dataclass(frozen=True, kw_only=True)
class FimConfig(Section):
    """Fill-in-the-middle: how many documents get another order, and the tokens in them."""

    fim_rate: float = _flag(0.0)
    fim_spm_rate: float = _flag(0.5)
    fim_split_sample: str | None = _flag(None)
    fim_fragment_rate: float | None = _flag(None)
    fim_no_prefix: str | None = _flag(None)
    fim_prefix_token: str = _flag("<fim_prefix>")
    fim_middle_token: str = _flag("<fim_middle>")
    fim_suffix_token: str = _flag("<fim_suffix>")
    fim_pad_token: str = _flag("<fim_pad>")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """How many samples a rank takes at once and all ranks take in one step."""

    micro_batch_size: int = _flag(4)
    global_batch_size: int | None = _flag(None)
    rampup_batch_size: tuple[int, int, int] | None = _flag(None)
    step_batch_size_schedule: tuple[str, ...] | None = _flag(None)

    rules = (
        one_of(
            "step_batch_size_schedule",
            "rampup_batch_size",
            message="{} are two ways to change the batch size: give one of them",
        ),
        requires(
            "rampup_batch_size",
            "global_batch_size",
            "{} needs --global-batch-size: the size at its end",
        ),
        Rule(
            ("rampup_batch_size",),
            lambda ramp: ramp and 0 in ramp[:2],
            "{}: start and increment must be at least 1",
        ),
        Rule(
            ("rampup_batch_size", "global_batch_size"),
            lambda ramp, final: ramp and ramp[0] > final,
            "{}: the start is larger than {}",
        ),
        Rule(
            ("rampup_batch_size", "global_batch_size"),
            lambda ramp, final: ramp and (final - ramp[0]) % ramp[1],
            "{}: steps of the increment from the start never reach {} exactly",
        ),
    )

    @property
    def batch_sizes(self) -> tuple[tuple[int, int], ...]:
        """`step_batch_size_schedule` as (tokens, size) pairs, ascending; empty without one.

        Raises InputError for text that is not a schedule.
        """
        words = " ".join(self.step_batch_size_schedule or ()).split()
        pairs = tuple(map(_batch_size_from, words))
        tokens = [first for first, _ in pairs]
        if pairs and (tokens[0] != 0 or tokens != sorted(set(tokens))):
            raise InputError(
                f"--step-batch-size-schedule {' '.join(words)}: the numbers of tokens must begin "
                "with 0 and ascend"
            )
        return pairs

    def check(self) -> None:
        """Raise InputError for a schedule that cannot be read or does not fit the batch size."""
        super().check()
        largest = max((size for _, size in self.batch_sizes), default=self.global_batch_size)
        if self.global_batch_size is not None and largest != self.global_batch_size:
            raise InputError(
                f"--global-batch-size {self.global_batch_size} is not the largest size of "
                f"--step-batch-size-schedule, {largest}: leave it out, or give that"
            )


def range_of_documents(text: str) -> tuple[float, float] | None:
    """The two shares of FROM:TO; None for other text."""
    match = re.fullmatch(r"(\d*\.?\d+|\d+\.):(\d*\.?\d+|\d+\.)", text, re.ASCII)
    bounds = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    return bounds if 0 <= bounds[0] < bounds[1] <= 1 else None


def _batch_size_from(word: str) -> tuple[int, int]:
    """Return (tokens, size) of a word like 2.4B:320."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", word, re.IGNORECASE | re.ASCII)
    if match is None:
        raise InputError(
            f"--step-batch-size-schedule {word}: expected TOKENS:SIZE, as in 2.4B:320 or 0:16"
        )
    power = 1000 ** " KMBT".index(match[2].upper() or " ")
    return int(Fraction(match[1]) * power), int(match[3])


def names_examples(data: DataConfig) -> bool:
    """Whether the data paths are files of examples; InputError if only some of them are."""
    groups = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    paths = [path for group in groups for path in group or ()]
    others = [path for path in paths if not path.endswith(EXAMPLES_SUFFIX)]
    if len(others) == len(paths):
        return False
    if others:
        raise InputError(
            f"{others[0]!r} stands beside {EXAMPLES_SUFFIX} files: examples are not blended by "
            f"weights nor with indexed datasets; name {EXAMPLES_SUFFIX} files only, for every split"
        )
    return True
