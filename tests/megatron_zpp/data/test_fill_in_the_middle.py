"""Fill-in-the-middle: what becomes of documents, how often, and that a restart changes nothing."""

from itertools import islice

import numpy as np
import pytest
import torch

from megatron_zpp.data.fill_in_the_middle import FillInTheMiddle, filled_in_the_middle
from megatron_zpp.data.loader import Loader
from megatron_zpp.settings.config import DataConfig, FimConfig
from megatron_zpp.tokenizer.base import ByteLevelTokenizer
from zeropp.errors import InputError

TOKENIZER = ByteLevelTokenizer(5)
EOD = TOKENIZER.eod
PREFIX, MIDDLE, SUFFIX, PAD, SPLIT = (TOKENIZER.id_of(f"<extra_id_{i}>") for i in range(5))
NAMES = {
    f"fim_{name}_token": f"<extra_id_{number}>"
    for number, name in enumerate(("prefix", "middle", "suffix", "pad"))
}
TEXT = "def add(first, second):\n    return first + second  # äöü\n"


class Texts:
    """Sample i is the text i, and ends with so many ends of documents that nothing is cut off."""

    def __init__(self, texts: list[list[int]], length: int = 256) -> None:
        self.texts, self.length = texts, length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = (self.texts[index] + [EOD] * self.length)[: self.length]
        return {"tokens": np.array(tokens, dtype=np.int64)}


def filled(texts: list[list[int]], seed: int = 1, **settings: object) -> FillInTheMiddle:
    config = FimConfig(**{"fim_rate": 1.0, **NAMES, **settings})
    config.check()
    return filled_in_the_middle([Texts(texts), None, None], config, TOKENIZER, seed)[0]


def documents(sample: dict[str, np.ndarray]) -> list[list[int]]:
    """The documents of a sample that are not empty."""
    tokens = sample["tokens"]
    assert len(tokens) == 256
    parts = np.split(tokens, np.flatnonzero(tokens == EOD) + 1)
    return [part[part != EOD].tolist() for part in parts if (part != EOD).any()]


def restored(document: list[int], *, suffix_first: bool) -> str:
    """The text of a document whose parts are in another order."""
    text = [*map(document.index, (PREFIX, SUFFIX, MIDDLE))]
    assert text == sorted(text) and text[0] == 0
    prefix = document[1 : text[1]]
    suffix, middle = document[text[1] + 1 : text[2]], document[text[2] + 1 :]
    assert suffix_first is False or not prefix
    return TOKENIZER.decode([*prefix, *middle, *suffix])


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_parts_make_the_text(rate):
    data = filled([TOKENIZER.encode(TEXT)] * 30, fim_spm_rate=rate)
    cuts = set()
    for index in range(30):
        (document,) = documents(data[index])
        assert restored(document, suffix_first=rate == 1) == TEXT
        cuts.add(document.index(MIDDLE))
    assert len(cuts) > 10  # of 57 places


def test_each_document_of_a_sample_has_its_turn():
    """Of 400 documents 200 are expected, with a standard deviation of 10; here within 5 of them."""
    words = [[*TOKENIZER.encode("a text"), EOD, *TOKENIZER.encode("another")]] * 200
    changed = [
        PREFIX in document
        for sample in map(filled(words, fim_rate=0.5).__getitem__, range(200))
        for document in documents(sample)
    ]
    assert len(changed) == 400 and 150 < sum(changed) < 250
    assert len(set(zip(changed[::2], changed[1::2], strict=True))) == 4


def test_a_sample_follows_from_seed_split_and_number():
    texts = [TOKENIZER.encode(TEXT)] * 8
    data, again, other = filled(texts), filled(texts), filled(texts, seed=2)
    first = [data[index]["tokens"] for index in range(8)]
    assert all(np.array_equal(again[i]["tokens"], first[i]) for i in reversed(range(8)))
    assert len({tokens.tobytes() for tokens in first}) > 4
    assert not all(np.array_equal(other[i]["tokens"], first[i]) for i in range(8))
    config = FimConfig(fim_rate=1.0, **NAMES)
    _, valid, _ = filled_in_the_middle([None, Texts(texts), None], config, TOKENIZER, 1)
    assert not all(np.array_equal(valid[i]["tokens"], first[i]) for i in range(8))


def test_a_restart_reads_the_same_samples():
    data = filled([TOKENIZER.encode(TEXT)] * 8, fim_rate=0.5)
    settings = {"micro_batch_size": 1, "rank": 0, "world": 2, "eod": EOD}
    config = DataConfig(num_workers=0)
    with Loader(data, config, consumed_samples=0, **settings) as loader:
        whole = list(islice(loader, 4))
    with Loader(data, config, consumed_samples=4, **settings) as loader:
        rest = list(islice(loader, 2))
    for one, other in zip(whole[2:], rest, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.labels, other.labels)


def test_what_is_too_long_is_cut_off():
    data = filled([TOKENIZER.encode(TEXT * 9)], fim_spm_rate=0.0)
    tokens = data[0]["tokens"]
    assert len(tokens) == 256 and tokens[0] == PREFIX and tokens.min() >= 0


class PairTokenizer(ByteLevelTokenizer):
    """Encodes "aa" as one id."""

    def encode_part(self, text: str) -> list[int]:
        return [
            255 if pair == "aa" else 97 for pair in text.replace("aa", "aa|").split("|") if pair
        ]

    def _decode(self, ids: list[int]) -> str:
        return "".join("aa" if token == 255 else chr(token) for token in ids)


def test_padding_has_no_loss():
    """A text that was tokenized in another way becomes shorter."""
    config, tokenizer = FimConfig(fim_rate=1.0, **NAMES), PairTokenizer(5)
    (data,) = filled_in_the_middle([Texts([[97] * 64], 64)], config, tokenizer, 1)
    tokens = data[0]["tokens"]
    assert len(tokens) == 64 and set(tokens[tokens < 0]) == {~PAD} and tokens[-1] == ~PAD
    loader = Loader(
        data, DataConfig(num_workers=0), consumed_samples=0, micro_batch_size=1, rank=0, world=1,
        eod=EOD,
    )  # fmt: skip
    with loader:
        batch = next(loader)
    expected = torch.from_numpy(tokens[1:] >= 0).float()
    assert torch.equal(batch.loss_mask[0], expected) and batch.tokens.min() >= 0


def test_parts_between_tokens_are_texts_of_their_own():
    """A document is a repository, of which each file may have another order."""
    files = [TOKENIZER.encode(f"file {number} of a repository") for number in range(3)]
    repository = [token for file in files for token in (*file, SPLIT)][:-1]
    settings = {"fim_split_sample": "<extra_id_4>", "fim_fragment_rate": 1.0, "fim_spm_rate": 0.0}
    (document,) = documents(filled([repository], **settings)[0])
    parts = np.split(np.array(document), np.flatnonzero(np.array(document) == SPLIT))
    found = [[token for token in part.tolist() if token != SPLIT] for part in parts]
    assert [restored(part, suffix_first=False) for part in found] == list(
        map(TOKENIZER.decode, files)
    )
    never = filled([repository], **{**settings, "fim_fragment_rate": 0.0})
    assert documents(never[0]) == [repository]


@pytest.mark.parametrize(
    "tokens", [TOKENIZER.encode("#!/bin/sh"), [0xA4, *TOKENIZER.encode("rger")]]
)
def test_a_text_that_is_excluded_or_cut_in_a_character_stays_as_it_is(tokens):
    assert documents(filled([tokens], fim_no_prefix="#!")[0]) == [tokens]


def test_a_tokenizer_without_the_tokens_is_named():
    config = FimConfig(fim_rate=0.5, fim_split_sample="<file>", fim_pad_token="<extra_id_0>")
    with pytest.raises(InputError) as caught:
        filled_in_the_middle([None], config, TOKENIZER, 1)
    for words in ("ByteLevelTokenizer has no token for --fim-prefix-token <fim_prefix>, ",
                  "--fim-split-sample <file>: name tokens", "--vocab-extra-ids 4"):  # fmt: skip
        assert words in str(caught.value)
    assert "--fim-pad-token" not in str(caught.value)
