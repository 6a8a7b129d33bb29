"""Blending against the sequential recurrence, and what `--data-path` may say."""

from functools import partial

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
from megatron_zpp.data.split import normalize


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
