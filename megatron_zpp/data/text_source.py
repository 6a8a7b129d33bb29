"""The text and the tokenizer of a run: those that are configured, or the default corpus.

Flags may name datasets in a file, or with the range of documents that each split takes:
`--data-args-path` and `--per-split-data-args-path` are Megatron-LM's, those named
`weighted-split-paths` are those of BigScience's Megatron-DeepSpeed.
"""

import dataclasses
import logging
import re
from itertools import chain
from pathlib import Path

from megatron_zpp.data.corpus import VOCAB_SIZE, Corpus, load_standard_library
from megatron_zpp.data.split import SPLITS, normalize
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from megatron_zpp.settings.data import EXAMPLES_SUFFIX, names_examples, range_of_documents
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from megatron_zpp.tokenizer.base import read_json, read_text
from zeropp.errors import InputError

DEFAULT_CACHE = ".cache"  # in the current folder
WEIGHTED = "weighted_split_paths"
_Dataset = tuple[str, str, str]  # weight, range of documents, prefix
SMALLEST_VOCAB_SIZE = 257  # of the default corpus: the bytes, and end of document

log = logging.getLogger("megatron_zpp")


def resolve_data(data: DataConfig, tokenizer: TokenizerConfig) -> tuple[DataConfig, Tokenizer]:
    """Return the data section with default paths filled in, and the tokenizer.

    Without any path or tokenizer, the text is the default corpus, with a tokenizer trained on it,
    of `vocab_size` entries if that is given; both are built by the first call and cached. For files
    of examples, attention and positions are reset at each example. Raises InputError if files are
    missing or invalid.
    """
    data = with_named_paths(data)
    if names_examples(data) and not (data.reset_attention_mask and data.reset_position_ids):
        data = dataclasses.replace(data, reset_attention_mask=True, reset_position_ids=True)
        log.info("examples: --reset-attention-mask and --reset-position-ids keep them apart")
    if _is_configured(data, tokenizer):
        return data, build_tokenizer(tokenizer)
    corpus = _load_default_corpus(data.data_cache_path, tokenizer)
    has_default_split = data.split == DataConfig().split
    data = dataclasses.replace(
        data,
        data_path=(str(corpus.prefix),),
        split=corpus.split if has_default_split else data.split,
    )
    return data, build_tokenizer(_corpus_tokenizer(corpus, tokenizer))


def resolve_tokenizer(cache: str | None, tokenizer: TokenizerConfig) -> TokenizerConfig:
    """Return `tokenizer`, or if it is not configured, the one of the default corpus in `cache`."""
    if _is_tokenizer_configured(tokenizer):
        return tokenizer
    return _corpus_tokenizer(_load_default_corpus(cache, tokenizer), tokenizer)


def resolve_vocab_size(data: DataConfig, tokenizer: TokenizerConfig) -> int:
    """Return the vocabulary size of the tokenizer of `resolve_data`, without reading any text."""
    if _is_configured(data, tokenizer):
        return build_tokenizer(tokenizer).vocab_size
    return _corpus_vocab_size(tokenizer) + tokenizer.vocab_extra_ids


def _load_default_corpus(cache: str | None, tokenizer: TokenizerConfig) -> Corpus:
    folder = Path(cache or DEFAULT_CACHE) / "standard-library"
    return load_standard_library(folder, vocab_size=_corpus_vocab_size(tokenizer))


def _corpus_vocab_size(tokenizer: TokenizerConfig) -> int:
    size = tokenizer.vocab_size or VOCAB_SIZE
    if size < SMALLEST_VOCAB_SIZE:
        raise InputError(
            f"--vocab-size {size}: a tokenizer of the default corpus has at least "
            f"{SMALLEST_VOCAB_SIZE} entries, the bytes and end of document"
        )
    return size


def _corpus_tokenizer(corpus: Corpus, tokenizer: TokenizerConfig) -> TokenizerConfig:
    return dataclasses.replace(
        tokenizer,
        tokenizer_type="HFTokenizer",
        tokenizer_model=str(corpus.tokenizer),
        vocab_size=None,
    )


def _is_configured(data: DataConfig, tokenizer: TokenizerConfig) -> bool:
    return data.names_data or _is_tokenizer_configured(tokenizer)


def _is_tokenizer_configured(tokenizer: TokenizerConfig) -> bool:
    sizes = {"vocab_size": tokenizer.vocab_size, "vocab_extra_ids": tokenizer.vocab_extra_ids}
    return tokenizer != TokenizerConfig(**sizes)


def with_named_paths(data: DataConfig) -> DataConfig:
    """Return `data` with the paths that its files and weighted ranges name, and without those.

    Raises InputError for a file that cannot be read or has another format, and for splits that this
    program does not support.
    """
    if data.data_args_path is not None:
        words = read_text(data.data_args_path, "--data-args-path").split()
        if not words:
            raise InputError(f"--data-args-path {data.data_args_path}: the file names no data")
        return dataclasses.replace(data, data_args_path=None, data_path=tuple(words))
    if data.per_split_data_args_path is not None:
        return _of_each_split(data)
    return _of_weighted_ranges(data)


def _of_each_split(data: DataConfig) -> DataConfig:
    """Read an object of three lists, each as --data-path would have it, or null."""
    flag = f"--per-split-data-args-path {data.per_split_data_args_path}"
    content = read_json(data.per_split_data_args_path, "--per-split-data-args-path")
    if not content or not content.keys() <= set(SPLITS):
        raise InputError(f"{flag}: expected an object with the keys {', '.join(SPLITS)}")
    changes = {}
    for split, paths in content.items():
        if isinstance(paths, str):
            paths = paths.split()
        if paths is not None and not isinstance(paths, list):
            raise InputError(f"{flag}: {split} is {paths!r}: expected a list as for --data-path")
        changes[f"{split}_data_path"] = tuple(map(str, paths)) if paths else None
    return dataclasses.replace(data, per_split_data_args_path=None, **changes)


def _of_weighted_ranges(data: DataConfig) -> DataConfig:
    changes, ranges = {}, []
    for split in SPLITS:
        name = f"{split}_{WEIGHTED}"
        groups, path = getattr(data, name), getattr(data, f"{name}_path")
        flag = f"--{name.replace('_', '-')}"
        if path is not None:
            groups = tuple(re.findall(r'"([^"]*)"', read_text(path, f"{flag}-path")))
            if not groups:
                raise InputError(
                    f'{flag}-path {path}: expected "NAME: WEIGHT FROM:TO PREFIX, ..." in quotes'
                )
        if groups is None:
            ranges.append("0:1")
            continue
        if len(groups) > 1:
            if split == "train":
                raise InputError(f"{flag}: {len(groups)} groups: training has one; keep one")
            log.info("%s: %d groups, mixed in equal shares", flag, len(groups))
        datasets = [_parse_group(group, flag) for group in groups]
        if len(groups) > 1:
            datasets = [
                [(f"{share:.15g}", *rest) for share, (_, *rest) in zip(shares, group, strict=True)]
                for group in datasets
                for shares in [normalize([float(weight) for weight, _, _ in group])]
            ]
        weights, bounds, prefixes = zip(*chain.from_iterable(datasets), strict=True)
        pairs = zip(weights, prefixes, strict=True)
        changes[f"{split}_data_path"] = tuple(chain.from_iterable(pairs))
        changes |= {name: None, f"{name}_path": None}
        ranges.append(bounds[0] if len(set(bounds)) == 1 else ",".join(bounds))
    if not changes:
        return data
    return dataclasses.replace(data, split_ranges=tuple(ranges), **changes)


def _parse_group(group: str, flag: str) -> list[_Dataset]:
    """Return the datasets of a group."""
    _, _, datasets = group.partition(":")
    parsed = []
    for dataset in datasets.split(","):
        match = re.fullmatch(r"\s*(\S+)\s+(\S+:\S+)\s+(\S+)\s*", dataset)
        if match is None:
            raise InputError(
                f"{flag} {group!r}: expected NAME: WEIGHT FROM:TO PREFIX, ..., as in "
                "'train: 0.7 0:0.95 web, 0.3 0:0.95 code'"
            )
        weight, bounds, prefix = match.groups()
        parsed.append((weight, bounds, prefix))
        is_number = re.fullmatch(r"\d*\.?\d+([eE][-+]?\d+)?", weight, re.ASCII)
        if not is_number or float(weight) == 0:
            raise InputError(f"{flag} {group!r}: {weight} is not a weight above 0")
        if range_of_documents(bounds) is None:
            raise InputError(
                f"{flag} {group!r}: {bounds} is not FROM:TO with 0 <= FROM < TO <= 1, as in 0:0.95"
            )
        if prefix.endswith(EXAMPLES_SUFFIX):
            raise InputError(f"{flag} {group!r}: examples have no ranges: give --train-data-path")
    return parsed
