"""The two files: byte-identical to Megatron's, a round trip for any text, damage named."""

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.indexed_dataset import IndexedDataset, write_dataset
from tests import indexed
from zeropp.errors import InputError

FILES = Path(__file__).parents[2] / "data"
HEADER = 34  # bytes


def write(prefix: Path, documents: list[list[list[int]]], vocab_size: int = 100) -> IndexedDataset:
    return IndexedDataset(indexed.write(prefix, documents, vocab_size))


@pytest.mark.parametrize("name", ["a_text_document", "b_text_document"])
def test_the_same_tokens_make_the_same_bytes_as_megatron(name: str, tmp_path: Path) -> None:
    source = IndexedDataset(FILES / name)
    assert len(source.document_index) == len(source) + 1  # one sequence each
    write(tmp_path / name, [[source.get(i).tolist()] for i in range(len(source))], 50257)
    for ending in (".bin", ".idx"):
        ours, theirs = (folder / f"{name}{ending}" for folder in (tmp_path, FILES))
        assert ours.read_bytes() == theirs.read_bytes()


sequences = st.lists(st.integers(0, 99), max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(sequences, max_size=3), max_size=6),
    vocab_size=st.sampled_from([100, 65499, 65500, 200_000]),
)
def test_round_trip(tmp_path_factory, documents: list, vocab_size: int) -> None:
    prefix = tmp_path_factory.mktemp("round") / "folder" / "text"
    flat = [sequence for document in documents for sequence in document]
    if not any(flat):
        with pytest.raises(InputError, match="the text is empty"):
            write(prefix, documents, vocab_size)
        assert not list(prefix.parent.iterdir())
        return
    dataset = write(prefix, documents, vocab_size)
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == flat
    assert np.diff(dataset.document_index).tolist() == [len(document) for document in documents]
    assert dataset.dtype == (np.uint16 if vocab_size < 65500 else np.int32)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["text.bin", "text.idx"]


def test_a_part_of_a_sequence_is_a_view_of_the_file(tmp_path: Path) -> None:
    dataset = write(tmp_path / "text", [[[1, 2, 3, 4]], [[5, 6]]])
    assert dataset.get(0, 1, 2).tolist() == [2, 3] and dataset.get(1, 1).tolist() == [6]
    assert not dataset.get(0).flags.owndata and not dataset.get(0).flags.writeable


def test_another_process_gets_the_name_not_the_tokens(tmp_path: Path) -> None:
    dataset = write(tmp_path / "text", [[list(range(100)) * 100]])
    sent = pickle.dumps(dataset)
    assert len(sent) < 500
    assert pickle.loads(sent).get(0).tolist() == dataset.get(0).tolist()


@pytest.mark.parametrize("token", [-1, 100, 70_000])
def test_a_token_out_of_the_vocabulary_leaves_no_file(token: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"token id {token} .*100 entries"):
        write(tmp_path / "text", [[[1, token]]])
    assert not list(tmp_path.iterdir())


def test_an_unfinished_rewrite_leaves_the_old_pair(tmp_path: Path) -> None:
    write(tmp_path / "text", [[[1, 2]]])

    def broken() -> Iterator[list]:
        yield [[3]]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_dataset(tmp_path / "text", 100, broken())
    assert IndexedDataset(tmp_path / "text").get(0).tolist() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def cut_bin(prefix: Path) -> None:
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])


def lengthen_bin(prefix: Path) -> None:
    with prefix.with_suffix(".bin").open("ab") as file:
        file.write(bytes(10))


def foreign_idx(prefix: Path) -> None:
    write(prefix.with_name("other"), [[[1, 2, 3]], [[4, 5, 6, 7]]])
    prefix.with_name("other.idx").replace(prefix.with_suffix(".idx"))


def patch_idx(offset: int, values: bytes):
    def patch(prefix: Path) -> None:
        path = prefix.with_suffix(".idx")
        content = bytearray(path.read_bytes())
        content[offset : offset + len(values)] = values
        path.write_bytes(content)

    return patch


def cut_idx(size: int):
    def cut(prefix: Path) -> None:
        path = prefix.with_suffix(".idx")
        path.write_bytes(path.read_bytes()[:size])

    return cut


def empty_both(prefix: Path) -> None:
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 1)
    prefix.with_suffix(".idx").write_bytes(header + bytes(8))
    prefix.with_suffix(".bin").write_bytes(b"")


DAMAGES = {  # 2 sequences of 3 and 2 tokens of 2 bytes: lengths at 34, pointers at 42, documents 58
    "truncated bin": (cut_bin, r"text\.bin has 8 bytes, but .*text\.idx describes 10"),
    "longer bin": (lengthen_bin, r"text\.bin has 20 bytes, but .*text\.idx describes 10"),
    "foreign idx": (foreign_idx, r"text\.bin has 10 bytes, but .*text\.idx describes 14"),
    "no idx": (lambda prefix: prefix.with_suffix(".idx").unlink(), r"text\.idx is missing"),
    "no bin": (lambda prefix: prefix.with_suffix(".bin").unlink(), r"text\.bin is missing"),
    "empty idx": (cut_idx(0), r"text\.idx has 0 bytes, expected 34 or more"),
    "short idx": (cut_idx(60), r"text\.idx has 60 bytes, but its header describes 82"),
    "other file": (patch_idx(0, b"PAR1"), r"text\.idx is not a Megatron index.*PAR1"),
    "version": (patch_idx(9, b"\2"), r"text\.idx is of version 2"),
    "type code": (patch_idx(17, b"\x09"), r"text\.idx gives its tokens the type code 9"),
    "negative length": (patch_idx(34, b"\xff" * 4), r"text\.idx is damaged: a length or pointer"),
    "odd pointer": (patch_idx(50, b"\3"), r"text\.idx is damaged: a length or pointer"),
    "far pointer": (patch_idx(54, b"\1"), r"text\.bin has 10 bytes, but .* describes"),
    "pointer past 64 bits": (
        patch_idx(42, struct.pack("<q", 2**63 - 2)),
        r"text\.idx is damaged: a length or pointer",
    ),
    "documents": (patch_idx(66, b"\7"), r"text\.idx is damaged: its document index"),
    "nothing": (empty_both, r"text\.idx holds no sequence: the dataset is empty"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    write(tmp_path / "text", [[[1, 2, 3]], [[4, 5]]])
    change, message = DAMAGES[damage]
    change(tmp_path / "text")
    with pytest.raises(InputError, match=message):
        IndexedDataset(tmp_path / "text")


def test_a_missing_dataset_is_named_with_what_may_be_meant(tmp_path: Path) -> None:
    """Also by the name that the preprocessor gave it."""
    for name in ("text", "corpus_text_document"):
        write(tmp_path / name, [[[1]]])
    (tmp_path / "corpus_half.idx").touch()
    for name, message in (
        ("none", r"expected .*none\.idx and .*none\.bin"),
        ("text.bin", r"without its ending, .*/text$"),
        ("corpus", rf"did you mean {tmp_path}/corpus_text_document\?$"),
        ("corp", "preprocess the text first"),
    ):
        with pytest.raises(InputError, match=message):
            IndexedDataset(tmp_path / name)
