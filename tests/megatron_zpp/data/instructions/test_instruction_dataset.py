"""Examples in rows: what has a loss, what is held out, what is repeated, and what is wrong."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.instructions.instruction_dataset import build_instructions, pack
from megatron_zpp.data.loader import Batch, Loader
from megatron_zpp.data.text_source import resolve_data
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.init import initialize
from megatron_zpp.settings.config import DataConfig, ModelConfig, TokenizerConfig
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import ByteLevelTokenizer, NullTokenizer
from tests.megatron_zpp.data.instructions.test_examples import write
from zeropp.errors import InputError

EOD = 49
NUMBERS = NullTokenizer(50)
APART = dict(reset_attention_mask=True, reset_position_ids=True, num_workers=0)


def build(path: str, seq_length: int = 15, sizes=(None, None, None), **more) -> tuple:
    data = DataConfig(**{"data_path": (path,), "split": "1,0,0", **more.pop("data", {})})
    return build_instructions(
        data, seq_length, sizes, more.pop("seed", 1), more.pop("tokenizer", NUMBERS)
    )


def asked(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": prompt, "answer": answer}


def rows(dataset, epochs: int = 1) -> list[list[int]]:
    return [dataset[number]["tokens"].tolist() for number in range(epochs * dataset.num_rows)]


def first_batch(dataset, micro: int) -> Batch:
    with Loader(
        dataset, DataConfig(**APART), consumed_samples=0, micro_batch_size=micro, rank=0, world=1,
        eod=EOD,
    ) as batches:  # fmt: skip
        return next(batches)


def test_prompts_and_fillings_are_complements(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", asked("1 2 3", "4 5"), {"text": "6 7 8"})
    train, valid, test = build(path)
    assert valid is None and test is None
    ((row),) = rows(train)
    assert row == [~1, ~2, ~3, 4, 5, EOD, ~6, 7, 8, EOD] + [~EOD] * 6
    assert train[0]["tokens"].dtype == np.int64


def test_what_opens_every_text_stands_before_each_example(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", asked("1 2 3", "4 5"), {"text": "6 7 8"})
    tokenizer = NullTokenizer(50)
    tokenizer.opening = (40,)
    ((row),) = rows(build(path, tokenizer=tokenizer)[0])
    assert row == [~40, ~1, ~2, ~3, 4, 5, EOD, ~40, 6, 7, 8, EOD] + [~EOD] * 4


def test_the_loader_turns_them_back(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", asked("1 2 3", "4 5"), {"text": "6 7 8"})
    batch = first_batch(build(path)[0], 1)
    whole = [1, 2, 3, 4, 5, EOD, 6, 7, 8] + [EOD] * 7
    assert batch.tokens.tolist() == [whole[:-1]] and batch.labels.tolist() == [whole[1:]]
    # Labels 4, 5, end; not the 6 that follows a foreign example; 7, 8, end; no filling.
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 1, 0, 1, 1, 1] + [0] * 6]
    assert batch.edges.tolist() == [0, 6, 10, 15]  # what fills up is one document
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 3, 4]]
    kinds = [batch.tokens, batch.labels, batch.position_ids, batch.loss_mask]
    assert [tensor.dtype for tensor in kinds] == [torch.int64] * 3 + [torch.float32]


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_the_loss_is_that_of_each_example_alone(position: str, tmp_path: Path) -> None:
    """Packed rows against one forward pass an example, with the loss written out plainly.

    Both are fp32 sums of the same few hundred terms in another order: 2^-24 a rounding.
    """
    random = np.random.default_rng(0)
    texts = [
        [" ".join(map(str, random.integers(1, EOD, random.integers(1, 6)))) for _ in range(2)]
        for _ in range(12)
    ]
    path = write(tmp_path / "a.jsonl", *(asked(*pair) for pair in texts))
    train, _, _ = build(path)
    config = ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=15,
        position_embedding_type=position, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPT(config, 50)
    initialize(model, 5, config)
    assert train.num_rows < 12  # something is packed
    losses = []
    for prompt, answer in texts:
        prompt_ids = NUMBERS.encode(prompt)
        ids = torch.tensor([*prompt_ids, *NUMBERS.encode(answer), EOD])
        logits = model(ids[None, :-1])[0].double()
        losses += F.cross_entropy(logits, ids[1:], reduction="none")[len(prompt_ids) - 1 :].tolist()
    batch = first_batch(train, train.num_rows)
    assert batch.loss_mask.sum().item() == len(losses)
    assert model(*batch.inputs()).item() == pytest.approx(np.mean(losses), rel=1e-6)


def test_a_hidden_end_inside_a_prompt_ends_nothing() -> None:
    """Some tokenizers' templates put their end between the turns of a conversation."""

    class Turns:
        hides_labels = True

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"tokens": np.array([~1, ~EOD, ~2, 3, EOD, ~4])}

    batch = first_batch(Turns(), 1)
    assert batch.tokens.tolist() == [[1, EOD, 2, 3, EOD]] and batch.edges.tolist() == [0, 5]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 0]]


def test_what_is_too_long_is_cut_or_divided(tmp_path, caplog):
    caplog.set_level(logging.INFO, "megatron_zpp")
    path = write(
        tmp_path / "a.jsonl",
        asked("1 2", "3 4 5 6"),  # 7 tokens with the end, 5 fit
        asked("1 2 3 4 5", "6"),  # no label fits
        {"text": "11 12 13 14 15 16 17 18"},
        {"text": "1 2 3 4"},
    )
    train, _, _ = build(path, seq_length=4)
    assert sorted(rows(train)) == sorted(
        [
            [~1, ~2, 3, 4, 5],
            [~11, 12, 13, 14, 15],
            [~15, 16, 17, 18, EOD],
            [~1, 2, 3, 4, EOD],
        ]
    )
    assert "truncated 2 examples that are longer than 5 tokens; left out 1 of them" in caplog.text
    assert "divided 1 texts that are longer than 5 tokens" in caplog.text
    assert "3 examples in 4 rows of 5 tokens, 100.0% full" in caplog.text


@pytest.mark.parametrize("length", range(1, 14))
def test_each_label_of_a_divided_text_once(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": " ".join(map(str, range(1, length + 1)))})
    train, _, _ = build(path, seq_length=4)
    labels = [token for row in rows(train) for token in row[1:] if token >= 0]
    assert sorted(labels) == [*range(2, length + 1), EOD]


def many(tmp_path: Path, count: int = 100) -> str:
    """Different examples of one token of prompt, one of answer and the end."""
    return write(
        tmp_path / "a.jsonl",
        *(asked(str(number // 10), str(10 + number % 10)) for number in range(count)),
    )


def contained(dataset) -> list[tuple[int, int]]:
    """The examples of one epoch."""
    line = [token for row in rows(dataset) for token in row if token != ~EOD]
    return sorted((~a, b) for a, b in zip(line[::3], line[1::3], strict=True))


def test_whole_examples_are_held_out_whatever_the_seed(tmp_path: Path) -> None:
    path = many(tmp_path)
    built = [build(path, data={"split": "80,15,5"}, seed=seed) for seed in (1, 2)]
    parts = [[contained(dataset) for dataset in three] for three in built]
    assert [len(part) for part in parts[0]] == [80, 15, 5]
    assert sorted(sum(parts[0], [])) == sorted(
        (number // 10, 10 + number % 10) for number in range(100)
    )
    assert parts[0] == parts[1]
    assert len({prompt for prompt, _ in parts[0][1]}) > 4  # from everywhere, not from one place
    assert rows(built[0][0]) != rows(built[1][0])


def test_epochs_are_orders_of_the_same_rows(tmp_path: Path) -> None:
    path = many(tmp_path)
    once, held, _ = build(path, data={"split": "1,1,0"})
    per_epoch = once.num_rows
    train, valid, _ = build(path, data={"split": "1,1,0"}, sizes=(3 * per_epoch - 1, 25, 0))
    assert (len(once), len(train)) == (per_epoch, 3 * per_epoch)
    line = rows(train, 3)
    epochs = [line[first : first + per_epoch] for first in range(0, len(line), per_epoch)]
    assert all(sorted(epoch) == sorted(rows(once)) for epoch in epochs)
    assert epochs[0] == rows(once) != epochs[1] != epochs[2]
    assert len(valid) >= 25 and rows(valid) * 2 == rows(valid, 2) and rows(valid) == rows(held)
    assert rows(build(path, data={"split": "1,1,0"})[0]) == rows(once)


def test_a_file_for_each_split(tmp_path: Path) -> None:
    paths = [
        (write(tmp_path / f"{number}.jsonl", {"text": f"{number} {number}"}),) for number in (1, 2)
    ]
    data = {"data_path": None, "train_data_path": paths[0], "valid_data_path": paths[1]}
    train, valid, test = build("", data=data | {"split": DataConfig().split})
    assert [rows(train)[0][1], rows(valid)[0][1], test] == [1, 2, None]
    with pytest.raises(InputError, match="--split '1,0,0' divides --data-path"):
        build("", data=data)


def test_a_share_too_small_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_zpp")
    train, valid, test = build(many(tmp_path, 20), data={"split": "969,30,1"})
    assert test is None and len(contained(train)) + len(contained(valid)) == 20
    assert "--split '969,30,1' leaves test none of 20 examples" in caplog.text


class Wrong(ByteLevelTokenizer):
    """Makes an id that it does not have."""

    vocab_size = 100


@pytest.mark.parametrize(
    ("lines", "tokenizer", "message"),
    [
        ([], NUMBERS, r"a\.jsonl: no examples to learn from \(none\)"),
        ([""], NUMBERS, r"a\.jsonl: no examples to learn from \(none\)"),
        ([asked("1 " * 20, "2")], NUMBERS, r"all are longer than --seq-length 15 \+ 1"),
        ([{"text": "1"}, asked("1", "two")], NUMBERS, r"line 2: NullTokenizer reads whole numb"),
        ([{"text": "1"}, asked("60", "2")], NUMBERS, r"line 2: token id 60 is outside the 50 ids"),
        ([{"text": "A"}, {"text": "x"}], Wrong(), r"line 2: ByteLevel.* makes token id 120 of it"),
    ],
)
def test_bad_input(lines: list, tokenizer: Tokenizer, message: str, tmp_path: Path) -> None:
    if isinstance(tokenizer, Wrong):
        tokenizer.vocab_size = Wrong.vocab_size
    with pytest.raises(InputError, match=message):
        build(write(tmp_path / "a.jsonl", *lines), tokenizer=tokenizer)


def test_documents_are_kept_apart_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_zpp")
    numbers = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50)
    data, _ = resolve_data(DataConfig(data_path=("a.jsonl",)), numbers)
    assert data.reset_attention_mask and data.reset_position_ids
    assert caplog.text.count("keep them apart") == 1
    caplog.clear()
    assert resolve_data(data, numbers)[0] == data and not caplog.text
    plain = DataConfig(data_path=("a",))
    assert resolve_data(plain, numbers)[0] == plain


@given(st.lists(st.integers(1, 20), max_size=80))
def test_each_example_once_and_no_row_too_full(lengths: list[int]) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert all(filled) and max(filled, default=0) <= 20
    # Any fit: two rows of which each is at most half full would have been one.
    assert sum(2 * length <= 20 for length in filled) <= 1
    fewest = -(-sum(lengths) // 20)
    assert len(rows) <= max(2 * fewest - 1, 0)
    assert pack(np.array(lengths, dtype=np.int64), 20) == rows


def test_the_space_that_fits_best() -> None:
    """7 and 6 open rows with spaces 3 and 4 of 10; the 4 goes to the 6, the 3 to the 7."""
    assert pack(np.array([3, 6, 7, 4]), 10) == [[2, 0], [1, 3]]
    assert pack(np.array([10, 10]), 10) == [[0], [1]]
