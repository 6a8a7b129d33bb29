"""Indices on disk: found again, never confused, never half written, built once for all who wait."""

import fcntl
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_zpp.data import index_cache as module
from megatron_zpp.data.blend import blend_index, exhaustive_blend_index
from megatron_zpp.data.index_cache import IndexCache
from megatron_zpp.data.sample_index import SampleIndex, SampleRequest, build_sample_index
from tests.full_disk import full_disk
from tests.ranks import ranks
from zeropp.errors import InputError

LENGTHS = np.array([3, 0, 7, 1, 12, 5, 5, 2], dtype=np.int32)
REQUEST = SampleRequest(sequences=range(1, 8), seq_length=4, num_samples=20, seed=3)
BUILT = "document_index.npy", "sample_index.npy", "shuffle_index.npy"
SECOND_ARRAY = 250  # bytes of a file; the first array of an index is smaller, the second larger


def build_cached(folder: Path, request: SampleRequest = REQUEST, lengths=LENGTHS) -> SampleIndex:
    return IndexCache(folder).sample_index(lengths, request, "text", "train")


def test_the_cache_gives_the_same_arrays_without_building(tmp_path: Path) -> None:
    built = build_cached(tmp_path / "deep" / "folder")
    files = sorted((tmp_path / "deep" / "folder").iterdir())
    assert [path.name.split("-")[-1] for path in files] == [
        "description.txt",
        "document_index.npy",
        "sample_index.npy",
        "shuffle_index.npy",
    ]
    marked = np.load(files[1]) * 0
    np.save(files[1], marked)
    loaded = build_cached(tmp_path / "deep" / "folder")
    assert (loaded.document == marked).all()
    assert (loaded.sample == built.sample).all() and (loaded.shuffle == built.shuffle).all()


OTHERS = ({"seed": 4}, {"num_samples": 21}, {"seq_length": 5}, {"sequences": range(0, 8)},
          {"sequences": range(1, 7)})  # fmt: skip
BLENDS = ([0.3, 0.7], 51), ([0.7, 0.3], 50), ([3, 7], None)


def test_what_is_asked_for_otherwise_is_another_entry(tmp_path: Path, monkeypatch) -> None:
    """Other documents, or another version of the format, too."""
    requests = [SampleRequest(**{**vars(REQUEST), **change}) for change in ({}, *OTHERS)]
    for count, request in enumerate(requests, 1):
        build_cached(tmp_path, request)
        assert len(list(tmp_path.iterdir())) == 4 * count
    build_cached(tmp_path, lengths=LENGTHS[::-1].copy())
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    build_cached(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4 * (count + 2)
    for count, request in enumerate([([0.3, 0.7], 50), *BLENDS], 1):
        IndexCache(tmp_path / "blends").blend_index(*request, "text", "train")
        assert len(list((tmp_path / "blends").iterdir())) == 3 * count


def test_a_damaged_cache_is_named(tmp_path: Path) -> None:
    build_cached(tmp_path)
    path = next(tmp_path.glob("*sample_index.npy"))
    whole = path.read_bytes()
    for size in (0, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=rf"{path.name} is damaged .*delete it"):
            build_cached(tmp_path)


def test_a_cache_of_other_data_under_our_name_is_noticed(tmp_path: Path) -> None:
    build_cached(tmp_path)
    path = next(tmp_path.glob("*sample_index.npy"))
    whole = np.load(path)
    np.save(path, whole[:-1])
    with pytest.raises(InputError, match=rf"{path.name} holds int32 .* of other data"):
        build_cached(tmp_path)
    np.save(path, whole)
    text = next(tmp_path.glob("*description.txt"))
    text.write_text(text.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(InputError, match=rf"{text.name} is of other data"):
        build_cached(tmp_path)


def test_a_blend_is_built_once_and_found_again(tmp_path: Path, monkeypatch) -> None:
    expected = blend_index([0.3, 0.7], 50), exhaustive_blend_index([5, 9, 1])

    def build_both() -> list[np.ndarray]:
        cache = IndexCache(tmp_path)
        weighted = cache.blend_index([0.3, 0.7], 50, "text", "train")
        return [*weighted, *cache.blend_index([5, 9, 1], None, "text", "train")]

    build_both()
    monkeypatch.setattr(module, "blend_index", None)
    monkeypatch.setattr(module, "exhaustive_blend_index", None)
    for cached, array in zip(build_both(), (*expected[0], *expected[1]), strict=True):
        assert isinstance(cached, np.memmap) and cached.dtype == array.dtype
        assert (cached == array).all()
    assert len(list(tmp_path.iterdir())) == 6


def test_those_who_come_while_it_is_built_wait_and_say_so(tmp_path, monkeypatch, caplog):
    calls = []

    def slow(*arguments: object) -> SampleIndex:
        calls.append(arguments)
        while "waiting" not in caplog.text:  # ends only if somebody does wait
            time.sleep(0.01)
        return build_sample_index(*arguments)

    monkeypatch.setattr(module, "build_sample_index", slow)
    with caplog.at_level(logging.INFO, "megatron_zpp"), ThreadPoolExecutor(3) as pool:
        built = list(pool.map(build_cached, [tmp_path] * 3))
    assert len(calls) == 1 and len(list(tmp_path.iterdir())) == 4  # the lock is gone
    assert "waiting for another process that builds" in caplog.text
    assert all((index.shuffle == built[0].shuffle).all() for index in built)


@ranks(4)
def test_ranks_share_one_blend(tmp_path: Path) -> None:
    dataset, sample = IndexCache(tmp_path).blend_index([0.5, 0.25, 0.25], 200_000, "text", "train")
    dist.barrier()
    assert isinstance(dataset, np.memmap) and isinstance(sample, np.memmap)
    assert np.bincount(dataset).tolist() == [100_000, 50_000, 50_000]
    assert len(list(tmp_path.iterdir())) == 3


def test_who_waited_for_a_builder_that_failed_builds(tmp_path: Path, monkeypatch) -> None:
    def fail(*arguments: object) -> SampleIndex:
        monkeypatch.undo()
        raise RuntimeError

    monkeypatch.setattr(module, "build_sample_index", fail)
    with pytest.raises(RuntimeError):
        build_cached(tmp_path)
    build_cached(tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.name.endswith(BUILT)]) == 3


def test_a_full_disk_is_named_and_nothing_stays(tmp_path: Path) -> None:
    message = r"cannot keep the sample index .*--data-cache-path"
    with full_disk(SECOND_ARRAY), pytest.raises(InputError, match=message):
        build_cached(tmp_path)
    with full_disk(SECOND_ARRAY), pytest.raises(InputError, match=message):
        IndexCache(tmp_path).blend_index([0.5, 0.5], 100, "text", "train")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("seq_length", "num_samples"), [(4, 10**15), (10**11, 9 * 10**18)])
def test_an_index_beyond_all_memory_is_named(seq_length, num_samples, tmp_path):
    request = SampleRequest(
        sequences=range(8), seq_length=seq_length, num_samples=num_samples, seed=1
    )
    with pytest.raises(InputError, match=rf"{num_samples} train samples .* the 35 of text .*fewer"):
        build_cached(tmp_path, request)
    assert not list(tmp_path.iterdir())


def test_where_nothing_has_to_be_kept_it_is_built_in_memory(tmp_path, caplog):
    cache, expected = IndexCache(tmp_path, required=False), build_sample_index(LENGTHS, REQUEST)
    with full_disk(SECOND_ARRAY):
        indices = [cache.sample_index(LENGTHS, REQUEST, "text", "train") for _ in range(2)]
        dataset, _ = cache.blend_index([0.5, 0.5], 100, "text", "train")
    assert all((index.shuffle == expected.shuffle).all() for index in indices)
    assert dataset.tolist() == [0, 1] * 50
    assert caplog.text.count("it is built in memory") == 1 and str(tmp_path) in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_lock_that_another_removed_is_taken_anew(tmp_path: Path, monkeypatch, caplog) -> None:
    """Who waited for a builder that failed holds the lock of a file that is gone."""
    entry_lock = []

    def build(*arguments: object) -> SampleIndex:
        entry_lock.extend(tmp_path.glob(".*.lock"))
        return build_sample_index(*arguments)

    monkeypatch.setattr(module, "build_sample_index", build)
    build_cached(tmp_path)
    lock = entry_lock.pop()
    for path in tmp_path.iterdir():
        path.unlink()
    with open(lock, "w") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        with caplog.at_level(logging.INFO, "megatron_zpp"):
            waiting = pool.submit(build_cached, tmp_path)
            while "waiting" not in caplog.text:
                time.sleep(0.01)
        lock.unlink()
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.result(timeout=30)
    assert entry_lock == [lock]


def test_leftovers_of_a_killed_builder_are_removed(tmp_path: Path) -> None:
    build_cached(tmp_path)
    path = next(tmp_path.glob("*sample_index.npy"))
    leftover = path.with_name(f".{path.name}.123.tmp")
    leftover.write_bytes(b"half")
    path.unlink()
    build_cached(tmp_path)
    assert not leftover.exists() and len(list(tmp_path.iterdir())) == 4


def test_without_locks_it_goes_on_and_says_so(tmp_path: Path, monkeypatch, caplog) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(module.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with caplog.at_level(logging.INFO, "megatron_zpp"):
        build_cached(tmp_path)
    assert "no locks in" in caplog.text and len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot keep .*--data-cache-path"):
        build_cached(tmp_path / "file" / "cache")
    assert os.listdir(tmp_path) == ["file"]
