"""The default corpus, built from a small library corpora here, and a look at the real one."""

import logging
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_zpp.commands.pretrain import main
from megatron_zpp.data import corpus as module
from megatron_zpp.data.corpus import Corpus, load_standard_library
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.text_source import resolve_data, resolve_vocab_size
from megatron_zpp.settings.config import DataConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.errors import InputError

NUM_FILES = 40
NUM_HELD_OUT = 2  # 5% of them
TRAINING = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --train-iters 1 "
    "--micro-batch-size 1 --eval-iters 0 --num-workers 0 --log-interval 1 --lr 1e-3 "
)
VOCAB_SIZE = 335  # somewhat fewer than there is to learn


def word(number: int) -> str:
    """A word that only file `number` has, often enough to become a token if it is trained on."""
    return "q" + "".join(chr(ord("a") + int(digit)) * 2 for digit in f"{number:02d}") + "z"


def content(number: int) -> str:
    return f'"""File."""\n\n\ndef {word(number)}(x):\n    return x\n' + f" {word(number)}" * 200


def make_library(folder: Path, numbers: list[int]) -> Path:
    """Sources in two folders, and next to them all that is to be left out."""
    for number in numbers:
        path = folder / ("package" if number % 2 else "") / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content(number))
    for name in ("test", "site-packages", "package/__pycache__", "package/tests", "encodings"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "left_out.py").write_text("left_out = 1\n")
    (folder / "_sysconfigdata_of_this_machine.py").write_text("left_out = 2\n")
    (folder / "notes.txt").write_text("left out\n")
    (folder / "empty.py").write_text("\n")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("library"), list(range(NUM_FILES)))


@pytest.fixture(scope="module")
def corpus(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(tmp_path_factory.mktemp("cache"), library)


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(corpus.tokenizer))
    )


def build(cache: Path, library: Path, **more: int) -> Corpus:
    return load_standard_library(cache, source=library, vocab_size=VOCAB_SIZE, **more)


def texts(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    """The documents, read back from the files; each must end with end of document, once."""
    dataset = IndexedDataset(corpus.prefix)
    assert list(dataset.document_index) == list(range(len(dataset) + 1))
    documents = [dataset.get(number).tolist() for number in range(len(dataset))]
    assert all(ids.index(tokenizer.eod) == len(ids) - 1 for ids in documents)
    return [tokenizer.decode(ids[:-1]) for ids in documents]


def files_of(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.prefix.parent.iterdir()}


def test_each_source_is_one_document(corpus: Corpus, tokenizer: Tokenizer) -> None:
    documents = texts(corpus, tokenizer)
    assert sorted(documents) == sorted(map(content, range(NUM_FILES)))
    assert corpus.num_documents == NUM_FILES
    assert corpus.num_bytes == sum(len(text.encode()) for text in documents)
    assert corpus.num_tokens == IndexedDataset(corpus.prefix).lengths.sum()
    assert tokenizer.vocab_size == VOCAB_SIZE


def test_order_is_that_of_hashes(corpus: Corpus, tokenizer: Tokenizer, library: Path) -> None:
    documents = texts(corpus, tokenizer)
    assert documents != sorted(documents)
    assert documents == list(module._read_source_files(library).values())


def test_held_out_documents_do_not_shape_the_tokenizer(corpus, tokenizer):
    """The word of a file is one token exactly if the tokenizer has seen the file."""
    order = [content(number) for number in range(NUM_FILES)]
    numbers = [order.index(text) for text in texts(corpus, tokenizer)]
    sizes = [len(tokenizer.encode(f" {word(number)}")) for number in numbers]
    assert sizes[:-NUM_HELD_OUT] == [1] * (NUM_FILES - NUM_HELD_OUT)
    assert min(sizes[-NUM_HELD_OUT:]) > 1


def test_vocab_size_without_data_is_that_of_its_tokenizer(library, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    data, tokens = DataConfig(data_cache_path=str(tmp_path)), TokenizerConfig(vocab_size=300)
    with_text, tokenizer = resolve_data(data, tokens)
    assert with_text.data_path is not None and tokenizer.vocab_size == 300
    assert resolve_vocab_size(data, tokens) == 300
    with pytest.raises(InputError, match="--vocab-size 256: .* at least 257"):
        resolve_vocab_size(data, TokenizerConfig(vocab_size=256))
    assert main([*TRAINING.split(), "--vocab-size", "300", "--data-cache-path", str(tmp_path)]) == 0
    assert "iteration        1/" in capsys.readouterr().out


def test_same_files_on_another_machine(corpus: Corpus, tmp_path: Path) -> None:
    """Another folder, files corpora in another order, line ends of Windows: the same bytes."""
    library = make_library(tmp_path / "library", list(reversed(range(NUM_FILES))))
    changed = library / "file4.py"
    changed.write_bytes(changed.read_bytes().replace(b"\n", b"\r\n"))
    other = build(tmp_path / "cache", library)
    assert other.prefix.parent.name == corpus.prefix.parent.name
    assert files_of(other) == files_of(corpus)


def test_other_text_or_seed_is_another_folder(library, tmp_path, monkeypatch):
    changed = shutil.copytree(library, tmp_path / "library")
    (changed / "file0.py").write_text(content(0) + "\n")
    cache = tmp_path / "cache"
    corpora = [build(cache, library), build(cache, changed)]
    monkeypatch.setattr(module, "SEED", 9)
    corpora.append(build(cache, library))
    assert len({corpus.prefix for corpus in corpora}) == 3
    assert len({corpus.prefix.with_suffix(".bin").read_bytes() for corpus in corpora}) == 3


def test_builders_at_the_same_time(library: Path, corpus: Corpus, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        corpora = list(pool.map(lambda _: build(tmp_path, library), range(3)))
    assert corpora[0] == corpora[1] == corpora[2]
    assert [path.name for path in tmp_path.iterdir()] == [corpus.prefix.parent.name]
    assert files_of(corpora[0]) == files_of(corpus)


def test_a_build_that_fails_leaves_nothing(library, tmp_path, monkeypatch):
    def full(prefix: Path, vocab_size: int, documents: object) -> int:
        assert prefix.with_name(module.TOKENIZER).exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_dataset", full)
    with pytest.raises(InputError, match=f"{tmp_path}: No space left .*--data-cache-path"):
        build(tmp_path, library)
    assert list(tmp_path.iterdir()) == []


def test_it_says_what_it_does_and_what_cannot_be_done(library, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="megatron_zpp")
    corpus = build(tmp_path, library)
    for line in (
        "1 files of",
        f"training a tokenizer of {VOCAB_SIZE} entries on 38 of them",
        f"40 of 40 files encoded, {corpus.num_tokens} tokens",
        "built in ",
    ):
        assert line in caplog.text
    path = corpus.prefix.with_suffix(".bin")
    written = path.stat().st_mtime_ns
    assert build(tmp_path, library) == corpus and path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:-2])
    (tmp_path / "cache").write_text("")
    for cache, source, message in (
        (tmp_path, library, f"{path.parent} was changed .*delete that folder"),
        (tmp_path / "cache", library, "cache: .*--data-cache-path"),
        (tmp_path / "other", tmp_path, f"0 Python sources in {tmp_path}; .*--data-path"),
    ):
        with pytest.raises(InputError, match=message):
            build(cache, source)


def test_the_real_library() -> None:
    source = Path(sysconfig.get_path("stdlib"))
    texts = module._read_source_files(source)
    sizes = [len(text) for text in texts.values()]
    held_out = module._validation_range(len(texts))
    assert len(texts) > 300
    assert sum(sizes) > 5_000_000
    assert 0.03 < sum(sizes[held_out.start :]) / sum(sizes) < 0.07
    parts = {part for path in texts for part in path.split("/")}
    assert {"json", "dataclasses.py"} < parts
    assert not parts & {"test", "tests", "site-packages", "__pycache__", "encodings"}
