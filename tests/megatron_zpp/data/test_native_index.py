"""The compiled loops against NumPy, bit for bit; and what happens without them."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data import native_index as module
from megatron_zpp.data.native_index import NativeIndex, native_index
from megatron_zpp.data.sample_index import sample_starts
from zeropp.native import library


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
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    assert native_index.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "expected_hash", lambda: "0" * 64)
    assert native_index.__wrapped__() is None
    for words in ("sample indices are built by NumPy", "csrc/ was not built"):
        assert words in caplog.text
    if native_index() is not None:
        assert "was built from other sources; install again (make setup)" in caplog.text
