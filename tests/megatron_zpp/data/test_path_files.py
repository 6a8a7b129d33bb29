"""Paths of data in flags and files, ranges of documents, and blends against the recurrence."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import blend as module
from megatron_zpp.data.blend import (
    BlendedDataset,
    blend_in_python,
    blend_index,
    count_samples,
    exhaustive_blend_index,
    parse_blend,
)
from megatron_zpp.data.gpt_dataset import build_datasets
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.split import normalize
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


def one_by_one(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    shares, counts = np.array(normalize(weights)), np.zeros(len(weights))
    datasets, samples = [], []
    for k in range(size):
        pick = int(np.argmax(shares * max(k, 1) - counts))
        datasets.append(pick)
        samples.append(int(counts[pick]))
        counts[pick] += 1
    return datasets, samples


weights = st.one_of(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=9),  # many ties
    st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=9),
)


@settings(max_examples=60, deadline=None)
@given(weights=weights, size=st.integers(1, 700))
def test_a_blend_takes_from_the_dataset_that_is_furthest_behind(weights, size) -> None:
    for blend in (partial(blend_index, weights), partial(blend_in_python, shares_of(weights))):
        dataset, sample = blend(size)
        assert (dataset.tolist(), sample.tolist()) == one_by_one(weights, size)
        assert dataset.dtype == np.int16 and sample.dtype == np.int64


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9))
def test_an_exhaustive_blend_takes_every_sample_once(sizes: list[int]) -> None:
    in_python = blend_in_python(shares_of(sizes), sum(sizes), np.array(sizes))
    for dataset, sample in (exhaustive_blend_index(sizes), in_python):
        pairs = sorted(zip(dataset.tolist(), sample.tolist(), strict=True))
        assert pairs == [(number, k) for number, size in enumerate(sizes) for k in range(size)]
        assert dataset.tolist() == one_by_one(sizes, sum(sizes))[0]


def shares_of(weights: list[float]) -> np.ndarray:
    return np.array(normalize(weights))


def test_samples_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 3)
    assert count_samples(np.array([0, 2, 2, 0, 0, 2, 0], dtype=np.int16), 4) == [4, 0, 3, 0]


def test_items_come_from_their_datasets() -> None:
    parts = [[f"a{i}" for i in range(9)], [f"b{i}" for i in range(9)]]
    blended = BlendedDataset(parts, blend_index([1.0, 2.0], 6))
    assert [blended[i] for i in range(len(blended))] == ["b0", "a0", "b1", "a1", "b2", "b3"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("a",), (["a"], None)),
        (("a", "b"), (["a", "b"], None)),
        (("0.3", "a", "b"), (["0.3", "a", "b"], None)),
        (("30", "a", "10", "b"), (["a", "b"], [0.75, 0.25])),
        (("2", "a"), (["a"], [1.0])),
    ],
)
def test_what_a_blend_may_say(paths: tuple, expected: tuple) -> None:
    assert parse_blend(paths) == expected
