"""The arrays of samples against a slow walk through the tokens, one by one."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import native_index as native_module
from megatron_zpp.data import sample_index as module
from megatron_zpp.data.native_index import NativeIndex, native_index
from megatron_zpp.data.sample_index import (
    SampleRequest,
    build_sample_index,
    plan_epochs,
    sample_starts,
)
from zeropp.native import library

LENGTHS = np.array([3, 0, 7, 1, 12, 5, 5, 2], dtype=np.int32)
REQUEST = SampleRequest(sequences=range(1, 8), seq_length=4, num_samples=20, seed=3)


def walk(lengths: list[int], seq_length: int) -> list[tuple[int, int]]:
    """Start (document, token) of every sample, by walking over all tokens."""
    places = [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    return places[::seq_length]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seq_length=st.integers(1, 7),
    num_samples=st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_those_of_a_walk(lengths, seq_length, num_samples, seed) -> None:
    request = SampleRequest(
        sequences=range(len(lengths)), seq_length=seq_length, num_samples=num_samples, seed=seed
    )
    index = build_sample_index(np.array(lengths, dtype=np.int32), request)
    walked = walk([lengths[d] for d in index.document], seq_length)
    assert [tuple(row) for row in index.sample[1:].tolist()] == walked[1:]
    assert index.sample[0].tolist() == [0, 0]
    assert len(index.shuffle) == len(index.sample) - 1 >= num_samples
    assert sorted(index.shuffle.tolist()) == list(range(len(index.shuffle)))
    epochs = len(index.document) // len(lengths)
    assert np.bincount(index.document).tolist() == [epochs] * len(lengths)
    assert (epochs - 1) * sum(lengths) < num_samples * seq_length + 1 <= epochs * sum(lengths)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 200), st.integers(1, 6), st.integers(1, 300))
def test_a_last_epoch_apart_comes_last(tokens: int, seq_length: int, num_samples: int) -> None:
    lengths = np.full(tokens // 5, 5, dtype=np.int32)
    request = SampleRequest(
        sequences=range(len(lengths)), seq_length=seq_length, num_samples=num_samples, seed=1
    )
    index = build_sample_index(lengths, request)
    epochs = plan_epochs(int(lengths.sum()), seq_length, num_samples)
    before = epochs.samples_before_last
    if before is None:
        return
    assert sorted(index.shuffle[:before].tolist()) == list(range(before))
    assert sorted(index.document[-len(lengths) :].tolist()) == list(range(len(lengths)))
    # Less than 0.8 of an epoch is needed of the last one.
    assert num_samples - before < int(0.8 * ((int(lengths.sum()) - 1) // seq_length))


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_beyond_32_bits(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(module, "native_index", lambda: None)
    longest, seq_length = 2**31 - 1, 2**30 - 3
    lengths = np.array([longest, 7, longest, longest - 5, 0, longest], dtype=np.int32)
    request = SampleRequest(
        sequences=range(6), seq_length=seq_length, num_samples=2**10, seed=2**31 - 1
    )
    index = build_sample_index(lengths, request)
    ends = np.cumsum([int(lengths[d]) for d in index.document])  # int64
    for row, (entry, token) in enumerate(index.sample.tolist()):
        assert int(ends[entry]) - int(lengths[index.document[entry]]) + token == row * seq_length
    assert len(index.shuffle) == (int(ends[-1]) - 1) // seq_length >= 2**10
    far = plan_epochs(2**40 + 1, 2048, 2**45 + 100)  # more than 2^56 tokens
    assert (far.count, far.samples_before_last) == (2**16 + 1, 2**45 + 31)


def test_the_last_epoch_stands_apart_below_four_fifths() -> None:
    # 1001 tokens make 100 samples of 10 + 1 in one epoch and 200 in two.
    assert plan_epochs(1001, 10, 100).count == 1
    assert plan_epochs(1001, 10, 179).samples_before_last == 100
    assert plan_epochs(1001, 10, 180).samples_before_last is None
    assert plan_epochs(1001, 10, 180).count == 2


@pytest.fixture(scope="module")
def loops() -> NativeIndex:
    loops = native_index()
    if loops is None:
        pytest.skip("csrc/ is not built here: make setup builds it where there is a compiler")
    return loops


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(0, 3000), max_size=3))
def test_a_shuffle_is_numpys_and_leaves_the_same_state(loops, seed: int, sizes: list) -> None:
    ours, theirs = np.random.RandomState(seed), np.random.RandomState(seed)
    for size, kind in zip(sizes, (np.int32, np.uint32, np.int32), strict=False):
        shuffled, expected = np.arange(size, dtype=kind), np.arange(size, dtype=kind)
        loops.shuffle(shuffled, ours)
        theirs.shuffle(expected)
        assert (shuffled == expected).all()
    assert ours.randint(2**31) == theirs.randint(2**31)


def test_a_long_shuffle(loops: NativeIndex) -> None:
    size = (1 << 20) + 77  # both sides of a power of two, where the rejection changes
    shuffled, expected = np.arange(size, dtype=np.int32), np.arange(size, dtype=np.int32)
    loops.shuffle(shuffled, np.random.RandomState(5))
    np.random.RandomState(5).shuffle(expected)
    assert (shuffled == expected).all()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=200).filter(any),
    seq_length=st.integers(1, 30),
    epochs=st.integers(1, 3),
    kind=st.sampled_from([np.int32, np.int64]),
)
def test_places_are_numpys(loops, lengths: list, seq_length: int, epochs: int, kind) -> None:
    lengths = np.array(lengths, dtype=np.int32)
    document = np.random.RandomState(1).permutation(np.tile(np.arange(len(lengths)), epochs))
    rows = (int(lengths.sum()) * epochs - 1) // seq_length + 1
    starts, expected = np.full((rows, 2), -1, dtype=kind), np.full((rows, 2), -1, dtype=kind)
    unaligned = np.frombuffer(b"..." + lengths.tobytes(), dtype=np.int32, offset=3)
    loops.sample_starts(unaligned, document.astype(np.int32), seq_length, starts)
    sample_starts(lengths, document, seq_length, expected)
    assert (starts == expected).all()


def test_without_its_library_it_says_so_and_numpy_does_the_work(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "megatron_zpp")
    monkeypatch.setattr(native_module, "FOLDER", tmp_path)
    assert native_index.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "expected_hash", lambda: "0" * 64)
    assert native_index.__wrapped__() is None
    for words in ("sample indices are built by NumPy", "csrc/ was not built"):
        assert words in caplog.text
    if native_index() is not None:
        assert "was built from other sources; install again (make setup)" in caplog.text
