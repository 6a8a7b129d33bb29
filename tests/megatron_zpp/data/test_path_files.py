"""Paths of data in files, and ranges of documents: the samples of the flags that say the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.gpt_dataset import build_datasets
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.text_source import resolve_data, with_named_paths
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from zeropp.errors import InputError

FILES = Path(__file__).parents[2] / "data"
A, B = str(FILES / "a_text_document"), str(FILES / "b_text_document")
VOCAB_SIZE = 50257


def samples(data: DataConfig, cache: Path) -> list[np.ndarray | None]:
    """The tokens of each split, int64 [n, 17]."""
    data, _ = resolve_data(
        data, TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB_SIZE)
    )
    datasets = build_datasets(data, 16, (40, 8, 4), 1234, VOCAB_SIZE)
    assert data.data_cache_path == str(cache)
    return [
        None if dataset is None else np.stack([dataset[i]["tokens"] for i in range(len(dataset))])
        for dataset in datasets
    ]


def require_same_samples(first: DataConfig, second: DataConfig, cache: Path) -> None:
    for one, other in zip(samples(first, cache), samples(second, cache), strict=True):
        assert (one is None) == (other is None)
        assert one is None or np.array_equal(one, other)


def test_a_file_of_data_args_is_the_data_path(tmp_path):
    (tmp_path / "args.txt").write_text(f"0.3 {A}\n0.7 {B}\n")
    common = {"data_cache_path": str(tmp_path), "split": "80,10,10"}
    named = DataConfig(data_args_path=str(tmp_path / "args.txt"), **common)
    require_same_samples(named, DataConfig(data_path=("0.3", A, "0.7", B), **common), tmp_path)


def test_a_json_for_each_split_is_a_path_for_each(tmp_path):
    content = {"train": ["0.3", A, "0.7", B], "valid": [B], "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(content))
    common = {"data_cache_path": str(tmp_path)}
    named = DataConfig(per_split_data_args_path=str(tmp_path / "splits.json"), **common)
    paths = {"train_data_path": ("0.3", A, "0.7", B), "valid_data_path": (B,)}
    require_same_samples(named, DataConfig(**paths, **common), tmp_path)
    (tmp_path / "splits.json").write_text(json.dumps({"train": f"0.3 {A} 0.7 {B}", "valid": [B]}))
    require_same_samples(named, DataConfig(**paths, **common), tmp_path)


def test_ranges_are_the_splits_of_the_documents(tmp_path):
    """`--split 80,10,10` of one dataset, as three ranges of it."""
    (tmp_path / "train.txt").write_text(f'"train: 1 0:0.8 {A}"\n')
    common = {"data_cache_path": str(tmp_path)}
    ranges = DataConfig(
        train_weighted_split_paths_path=str(tmp_path / "train.txt"),
        valid_weighted_split_paths=(f"valid: 1.0 0.8:0.9 {A}",),
        test_weighted_split_paths=(f"test: 1.0 .9:1 {A}",),
        **common,
    )
    require_same_samples(ranges, DataConfig(data_path=(A,), split="80,10,10", **common), tmp_path)


def test_ranges_are_those_of_the_flag(tmp_path):
    common = {"data_cache_path": str(tmp_path)}
    paths = {f"{split}_data_path": (A,) for split in ("train", "valid", "test")}
    ranges = DataConfig(**paths, split_ranges=("0:0.8", ".8:.9", "0.9:1"), **common)
    require_same_samples(ranges, DataConfig(data_path=(A,), split="80,10,10", **common), tmp_path)


def test_ranges_of_several_datasets_have_their_weights(tmp_path):
    group = f"train: 0.3 0:1 {A}, 0.7 0:1 {B}"
    common = {"data_cache_path": str(tmp_path)}
    weighted = DataConfig(train_weighted_split_paths=(group,), **common)
    whole = DataConfig(train_data_path=("0.3", A, "0.7", B), **common)
    require_same_samples(weighted, whole, tmp_path)


def test_groups_of_validation_are_equal_shares_of_one_set(tmp_path, caplog):
    """Each group is a set of its own in BigScience's program."""
    caplog.set_level("INFO", "megatron_zpp")
    common = {"data_cache_path": str(tmp_path)}
    groups = (f"one: 3 0:0.5 {A}, 1 0.5:1 {A}", f"other: 5 0:1 {B}")
    data = with_named_paths(DataConfig(valid_weighted_split_paths=groups, **common))
    assert data.valid_data_path == ("0.75", A, "0.25", A, "1", B)
    assert data.split_ranges == ("0:1", "0:0.5,0.5:1,0:1", "0:1")
    assert "2 groups, mixed in equal shares" in caplog.text
    _, valid, _ = build_datasets(data, 16, (0, 8, 0), 1234, VOCAB_SIZE)
    read = [sorted(set(dataset.indices[0].document.tolist())) for dataset in valid.datasets]
    half, end = len(IndexedDataset(A)) // 2, len(IndexedDataset(A))
    assert read == [[*range(half)], [*range(half, end)], [*range(len(IndexedDataset(B)))]]
    assert np.bincount(valid.dataset_index).tolist() == [3, 1, 4]


def test_each_dataset_has_its_range_or_all_have_one(tmp_path):
    ranges = ("0:0.5,0.5:1", "0:1", "0:1")
    data = DataConfig(train_data_path=(A, A, B), split_ranges=ranges, data_cache_path=str(tmp_path))
    with pytest.raises(InputError, match="2 ranges for the 3 datasets of train"):
        build_datasets(data, 16, (8, 0, 0), 1234, VOCAB_SIZE)


def test_an_empty_range_of_documents_is_named(tmp_path):
    group = f"train: 1 0:0.0000001 {A}"
    data = DataConfig(train_weighted_split_paths=(group,), data_cache_path=str(tmp_path))
    with pytest.raises(InputError, match="no document .* between the shares 0 and 1e-07"):
        samples(data, tmp_path)
