"""Samples equal to megatron-core 0.19.2's, bit for bit; and data that is not enough, named."""

import hashlib
import json
import logging
import re
import resource
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import chain
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from megatron_zpp.data.gpt_dataset import GPTDataset, MockDataset, build_datasets
from megatron_zpp.data.indexed_dataset import write_dataset
from megatron_zpp.data.loader import Loader
from megatron_zpp.data.split import parse_split
from megatron_zpp.settings.config import DataConfig
from zeropp.errors import InputError

FILES = Path(__file__).parents[2] / "data"
CASES = {
    case["name"]: case
    for name in ("megatron_core.json", "megatron_core_more.json")
    for case in json.loads((FILES / name).read_text())["cases"]
}
EOD, VOCAB_SIZE = 50256, 50257


def sha(array: np.ndarray, kind: str) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, dtype=kind).tobytes()).hexdigest()


def locate(paths: list[str] | None) -> tuple[str, ...] | None:
    if paths is None:
        return None
    return tuple(str(FILES / path) if "document" in path else path for path in paths)


def config_of(case: dict, cache: Path) -> DataConfig:
    names = {field.name for field in fields(DataConfig)} & set(case)
    values = {name: case[name] for name in names}
    values |= {name: locate(values[name]) for name in names if name.endswith("data_path")}
    return DataConfig(**values, data_cache_path=str(cache), num_workers=0)


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_megatron_core(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    data = config_of(case, tmp_path)
    for _ in range(2):  # built, then from the cache
        built = build_datasets(
            data, case["seq_length"], tuple(case["sizes"]), case["seed"], VOCAB_SIZE
        )
        for dataset, expected in zip(built, case["results"].values(), strict=True):
            if expected is None or not expected["length"]:
                assert dataset is None
                continue
            assert len(dataset) == expected["length"]
            tokens = np.stack([dataset[i]["tokens"] for i in range(len(dataset))])
            assert tokens.dtype == np.int64 and sha(tokens, "<i4") == expected["samples"]
            assert digests(dataset) == expected["indices"]
            if "loss_mask" in expected:
                assert masks(dataset, data) == [expected["loss_mask"], expected["position_ids"]]


def digests(dataset) -> list[str]:
    if isinstance(dataset, GPTDataset):
        (index,) = dataset.indices
        return [sha(index.document, "<i4"), sha(index.sample, "<i4"), sha(index.shuffle, "<u4")]
    return [sha(dataset.dataset_index, "<i2"), sha(dataset.dataset_sample_index, "<i8")]


def masks(dataset, data: DataConfig) -> list[str]:
    rows = min(8, len(dataset))
    loader = Loader(
        dataset, data, consumed_samples=0, micro_batch_size=rows, rank=0, world=1, eod=EOD
    )
    batch = next(loader)
    return [sha(batch.loss_mask.numpy(), "<f4"), sha(batch.position_ids.numpy(), "<i8")]


def build(data: DataConfig, sizes=(5, 0, 0), seq_length=8, vocab_size=VOCAB_SIZE) -> tuple:
    return build_datasets(data, seq_length, sizes, 1, vocab_size)


def text(folder: Path, name: str, documents: int, length: int) -> str:
    """A dataset of equally long documents of the tokens 1, 2 ..."""
    write_dataset(folder / name, VOCAB_SIZE, [[np.arange(1, length + 1)]] * documents)
    return str(folder / name)


@pytest.mark.parametrize("weights", [(), ("0.3", "0.7")])
def test_a_longer_run_keeps_the_order_and_the_number_of_epochs(weights, tmp_path):
    """Documents of 8 tokens, as a sample has: each is seen as often as others, give or take one."""
    prefixes = [str(tmp_path / name) for name in ("a", "b")]
    for number, prefix in enumerate(prefixes):
        first = number * 16
        documents = [np.full(8, first + document) for document in range(11 + number)]
        write_dataset(prefix, 64, [[tokens] for tokens in documents])
    paths = chain(*zip(weights, prefixes, strict=True)) if weights else prefixes[:1]
    data = DataConfig(data_path=tuple(paths), split="1")

    def seen(*sizes: int, **changes: str) -> list[tuple]:
        train, _, _ = build_datasets(
            replace(data, **changes), 8, (sizes[-1], 0, 0), 1, 64,
            earlier=[(size, 0, 0) for size in sizes[:-1]],
        )  # fmt: skip
        return [tuple(train[index]["tokens"].tolist()) for index in range(len(train))]

    first, fresh, longer = seen(25), seen(90), seen(25, 90)
    again = seen(25, 90, 40, 200)
    assert fresh[: len(first)] != first  # the order of megatron-core
    assert longer[:25] == first[:25] and again[:90] == longer[:90]
    assert len(longer) >= 90 and len(again) >= 200
    assert seen(25, 90, dataloader_type="cyclic") == first
    times = Counter(tokens[0] for tokens in (again if weights else longer[:90]))
    for start in (0, 16)[: 1 + bool(weights)]:
        counts = [times[document] for document in range(start, start + 11 + start // 16)]
        # A seam of two orders cuts a sample off, and a blend's part may end within an epoch twice.
        assert max(counts) - min(counts) <= 2 + bool(weights), counts


@pytest.mark.parametrize("hard", [None, 90])
def test_more_datasets_than_the_limit_of_open_files(hard: int | None, tmp_path: Path) -> None:
    """The soft limit is raised where the hard one allows it, or the error says what to do."""
    prefix = text(tmp_path, "text", 20, 9)
    data = DataConfig(data_path=("1", prefix) * 30, split="1", data_cache_path=str(tmp_path))
    build(data)  # the index is cached: mapping it meets the limit
    data = DataConfig(data_path=data.data_path + ("1", text(tmp_path, "b", 20, 9)), split="1")

    def limited(connection: Connection) -> None:
        most = hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, most))
        with pytest.raises(InputError) if hard else nullcontext() as error:
            build(data)
        connection.send(str(error and error.value))

    ours, theirs = Pipe()
    process = get_context("fork").Process(target=limited, args=(theirs,))
    process.start()
    assert ours.poll(60)
    message = ours.recv()
    process.join()
    assert re.search(
        "too many open files: a process may have 90.*ulimit -Hn" if hard else "None", message
    )


def test_a_split_without_documents_is_named(tmp_path: Path) -> None:
    data = DataConfig(data_path=(text(tmp_path, "few", 300, 9),))
    message = r"--split '969, 30, 1' leaves no document for test of the 300 in .*few"
    with pytest.raises(InputError, match=message):
        build(data, sizes=(50, 5, 5))
    train, valid, test = build(data, sizes=(50, 5, 0))  # no sample of it is asked for
    assert len(train) >= 50 and len(valid) >= 5 and test is None


def test_a_dataset_shorter_than_a_sample(tmp_path: Path, caplog) -> None:
    data = DataConfig(data_path=(text(tmp_path, "short", 2, 4),), split="1")
    assert len(build(data)[0]) >= 5  # as megatron-core repeats it
    assert "the 8 tokens of" in caplog.text and "they are repeated" in caplog.text
    assert build(data, sizes=(None, 0, 0))[0] is None  # no sample without repeating
    blend = DataConfig(data_path=data.data_path * 2, split="1")
    with pytest.raises(InputError, match=r"short has 8 tokens .* --seq-length 8 \+ 1"):
        build(blend)


def test_tokens_that_are_no_whole_numbers_are_named(tmp_path: Path) -> None:
    prefix = text(tmp_path, "text", 4, 10)
    idx, bin = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    index = bytearray(idx.read_bytes())
    pointers = np.arange(4, dtype="<i8") * 40
    index[17], index[34 + 4 * 4 : 34 + 12 * 4] = 7, pointers.tobytes()
    idx.write_bytes(index)
    bin.write_bytes(np.fromfile(bin, dtype="<u2").astype("<f4").tobytes())
    with pytest.raises(InputError, match=r"text\.idx gives its tokens the type float32"):
        build(DataConfig(data_path=(prefix,), split="1"))


def samples(prefix: str) -> list[dict[str, np.ndarray]]:
    dataset, _, _ = build(DataConfig(data_path=(prefix,), split="1"))
    return [dataset[number] for number in range(len(dataset))]


@pytest.mark.parametrize("kind", ["<u1", "<i1", "<i2", "<i4", "<i8", "<u2"])
def test_every_type_of_whole_numbers(kind: str, tmp_path: Path) -> None:
    prefix = text(tmp_path, "text", 4, 10)
    expected = [sample["tokens"] for sample in samples(prefix)]
    width, code = np.dtype(kind).itemsize, "<u1 <i1 <i2 <i4 <i8 f8 f4 <u2".split().index(kind) + 1
    idx, bin = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    index = bytearray(idx.read_bytes())
    index[17] = code
    index[34 + 4 * 4 : 34 + 12 * 4] = (np.arange(4, dtype="<i8") * 10 * width).tobytes()
    idx.write_bytes(index)
    bin.write_bytes(np.fromfile(bin, dtype="<u2").astype(kind).tobytes())
    tokens = [sample["tokens"] for sample in samples(prefix)]
    assert (np.array(tokens) == np.array(expected)).all() and tokens[0].dtype == np.int64


def test_a_split_shorter_than_a_sample_repeats_its_text_and_says_so(tmp_path, caplog) -> None:
    data = DataConfig(data_path=(text(tmp_path, "text", 4, 6),), split="3,1,0")
    with caplog.at_level(logging.INFO, "megatron_zpp"):
        _, valid, _ = build(data, sizes=(2, 2, 0))
    steps = np.diff(valid[0]["tokens"])
    assert len(steps) == 8 and set(steps % 6) == {1}  # 1 to 6 again and again
    assert "valid: the 6 tokens of" in caplog.text and "they are repeated" in caplog.text


def test_a_blend_takes_more_of_a_dataset_than_its_surplus(tmp_path: Path) -> None:
    # Each of the 20 small weights rounds up to one sample, which lengthens the blend and with it
    # the share of the first dataset to more than 1.005 times its rounded one.
    small = [text(tmp_path, f"small{i}", 1, 9) for i in range(20)]
    large = text(tmp_path, "large", 1, 8 * 60 + 1)  # 60 samples in one epoch
    paths = ["100", large]
    for prefix in small:
        paths += ["1", prefix]
    train, _, _ = build(DataConfig(data_path=tuple(paths), split="1"), sizes=(71, 0, 0))
    assert len(train) == 60 + 20
    taken = np.bincount(train.dataset_index)[0]
    assert taken > 60 and len(train.datasets[0]) >= taken
    assert all(len(train[i]["tokens"]) == 9 for i in range(len(train)))


def test_prefixes_without_weights_make_one_epoch(tmp_path: Path) -> None:
    paths = (text(tmp_path, "one", 4, 17), text(tmp_path, "two", 2, 17))
    train, _, _ = build(DataConfig(data_path=paths, split="1"), sizes=(1000, 0, 0))
    assert np.bincount(train.dataset_index).tolist() == [8, 4]  # (tokens - 1) // 8 of each


def test_a_token_out_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    data = DataConfig(data_path=(text(tmp_path, "text", 3, 40),), split="1")
    train, _, _ = build(data, vocab_size=40)
    with pytest.raises(InputError, match=r"text\.bin holds token id 40, .* has 40 entries"):
        [train[i] for i in range(len(train))]
    train, _, _ = build(data, vocab_size=41)
    assert max(train[i]["tokens"].max() for i in range(len(train))) == 40


@pytest.mark.parametrize(
    "split",
    ["96,3,1", "96/3/1", " 96; 3;1 ", "96%,3%,1%", "(96, 3, 1)", "0.96 .03 .01", "96.,3.,1."],
)
def test_megatrons_spellings_of_a_split(split: str) -> None:
    bounds = [(0.0, 0.96), (0.96, 0.99), (0.99, 1.0)]
    assert [pytest.approx(pair) for pair in bounds] == list(parse_split(split))


NO_SPLIT = ("", " ", "a,b", "-1,2", "1,2,3,4", "0,0,0", "1.2.3", ".", "nan,1", "1e3,1", "9" * 400)
REFUSED = [
    *(({"split": split}, 5, "--split") for split in NO_SPLIT),
    ({"data_path": ("1", "{}"), "split": "1"}, None, "train: datasets with weights need a number"),
    ({"data_path": None, "train_data_path": ("{}",), "split": "9,1"}, 5,
     "--split '9,1' divides --data-path; .*leave --split out"),
    ({"data_path": ("nowhere/text",)}, 5, "no dataset at nowhere/text"),
    ({"data_path": None}, 5, "--data-path"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "size", "message"), REFUSED)
def test_what_is_no_data_is_named(changes: dict, size, message: str, tmp_path: Path) -> None:
    prefix = text(tmp_path, "text", 3, 40)
    fields = {
        name: tuple(each.format(prefix) for each in value) if isinstance(value, tuple) else value
        for name, value in ({"data_path": (prefix,)} | changes).items()
    }
    with pytest.raises(InputError, match=message):
        build(DataConfig(**fields), sizes=(size, 0, 0))


def test_a_blend_is_kept_beside_its_first_dataset(tmp_path: Path) -> None:
    one, two = (text(tmp_path, name, 3, 40) for name in ("one", "two"))
    build(DataConfig(data_path=("1", one, "3", two), split="1"), sizes=(20, 0, 0))
    own = [path.name for path in Path(one, "cache", "GPTDataset_indices").iterdir()]
    assert len(own) == 4 and all("-GPTDataset-train-" in name for name in own)
    names = sorted(path.name for path in Path(one, "cache", "BlendedDataset_indices").iterdir())
    assert [name.split("-", 1)[1] for name in names] == [
        "BlendedDataset-train-dataset_index.npy",
        "BlendedDataset-train-dataset_sample_index.npy",
        "BlendedDataset-train-description.txt",
    ]
    assert not Path(two, "cache", "BlendedDataset_indices").exists()


def test_made_up_samples_depend_on_seed_split_and_index_only() -> None:
    data = DataConfig(mock_data=True)
    train, valid, test = build(data, sizes=(100, 10, 0), vocab_size=13)
    again, _, _ = build(data, sizes=(200, 10, 0), vocab_size=13)
    tokens = [train[i]["tokens"] for i in range(100)]
    assert isinstance(train, MockDataset) and (len(train), len(valid), test) == (100, 10, None)
    assert all((again[i]["tokens"] == tokens[i]).all() for i in (0, 57, 99))
    assert len({tuple(sample) for sample in tokens}) == 100
    assert (valid[0]["tokens"] != tokens[0]).any()
    assert {len(sample) for sample in tokens} == {9}
    assert set(np.concatenate(tokens)) == set(range(13))
