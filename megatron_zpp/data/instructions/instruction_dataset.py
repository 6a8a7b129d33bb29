"""Rows of S + 1 tokens, packed from fine-tuning examples.

An example is the tokenizer's opening ids, the prompt, the answer, and end of document. The prompt
is encoded separately, as in generation. Tokens without loss are stored as the complement (~id,
negative) of their id: prompts; the first token of every example, whose preceding token belongs to
another example; and padding at the end of a row, which is complements of end of document.
"""

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from megatron_zpp.data.gpt_dataset import refuse_split
from megatron_zpp.data.indexed_dataset import id_outside
from megatron_zpp.data.instructions.examples import Example, read_examples
from megatron_zpp.data.split import SPLITS, parse_split, sequence_range
from megatron_zpp.settings.config import DataConfig
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError

BATCH = 1000  # examples that are tokenized at once
HELD_OUT_SEED = 20240501  # not --seed: runs with another seed evaluate the same examples

logger = logging.getLogger("megatron_zpp")

Pieces = list[np.ndarray]  # the tokens of one example: int32 [length], each fits into a row


class InstructionDataset:
    """At least `size` rows of pieces of examples (None: each row once).

    With `shuffles` every epoch has its own order, otherwise all epochs have the same.
    `hides_labels` tells the loader that complements mark tokens without loss.
    """

    hides_labels = True

    def __init__(
        self,
        pieces: Pieces,
        seq_length: int,
        eod: int,
        size: int | None,
        *,
        seed: int,
        shuffles: bool,
    ) -> None:
        self._length, self._padding = seq_length + 1, ~eod
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        rows = pack(lengths, self._length)
        self.num_rows = len(rows)
        self.fill_ratio = lengths.sum() / (len(rows) * self._length)
        # Forked workers share arrays; the pages of Python lists would be copied gradually.
        self._tokens = np.concatenate([pieces[number] for row in rows for number in row])
        row_lengths = [sum(len(pieces[number]) for number in row) for row in rows]
        self._edges = np.concatenate(([0], np.cumsum(row_lengths, dtype=np.int64)))
        orders = []
        for epoch in range(math.ceil((size or 1) / self.num_rows)):
            random = np.random.default_rng((seed, epoch if shuffles else 0))
            orders.append(random.permutation(self.num_rows))
        self._order = np.concatenate(orders)

    def __len__(self) -> int:
        return len(self._order)

    def epochs(self, num_samples: float) -> tuple[float, ...]:
        """How often `num_samples` rows go through the examples."""
        return (num_samples / self.num_rows,)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return row `index`: dict(tokens int64 [S + 1]); negative tokens are complements."""
        row = self._order[index]
        tokens = np.full(self._length, self._padding, dtype=np.int64)
        row_tokens = self._tokens[self._edges[row] : self._edges[row + 1]]
        tokens[: len(row_tokens)] = row_tokens
        return {"tokens": tokens}


def build_instructions(
    data: DataConfig,
    seq_length: int,
    sizes: tuple[int | None, int | None, int | None],
    seed: int,
    tokenizer: Tokenizer,
) -> tuple[InstructionDataset | None, ...]:
    """Return training, validation and test rows, at least `sizes`.

    A split without examples is None. `--split` holds out whole examples, chosen at random and the
    same in every run. Raises InputError for invalid files, lines, fields and token ids, and if
    there is no example.
    """
    if data.data_path is not None:
        encoded = _encode_files(data.data_path, seq_length, tokenizer)
        examples_by_split = _divide(encoded, data.split)
    else:
        refuse_split(data.split)
        paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
        examples_by_split = [
            _encode_files(path, seq_length, tokenizer) if path else [] for path in paths
        ]
    datasets = []
    for split, examples, size in zip(SPLITS, examples_by_split, sizes, strict=True):
        pieces = [piece for example in examples for piece in example]
        if not pieces or size == 0:
            datasets.append(None)
            continue
        dataset = InstructionDataset(
            pieces, seq_length, tokenizer.eod, size, seed=seed, shuffles=split == SPLITS[0]
        )
        logger.info(
            "%s: %d examples in %d rows of %d tokens, %.1f%% full",
            *(split, len(examples), dataset.num_rows, seq_length + 1, 100 * dataset.fill_ratio),
        )
        datasets.append(dataset)
    return tuple(datasets)


@dataclass(kw_only=True)
class _Encoder:
    """Encode examples into pieces of at most `max_length` tokens.

    num_cut: prompts with answers that were too long. num_dropped: those without any label left.
    num_divided: texts that were too long.
    """

    tokenizer: Tokenizer
    max_length: int
    num_cut: int = 0
    num_divided: int = 0
    num_dropped: int = 0
    examples: list[Pieces] = field(default_factory=list)

    def add(self, examples: Sequence[Example]) -> None:
        """Encode examples and append them to `self.examples`."""
        prompts = self._encode(examples, [example.prompt or "" for example in examples])
        answers = self._encode(examples, [example.answer for example in examples])
        for example, prompt, answer in zip(examples, prompts, answers, strict=True):
            self._check(prompt, answer, example.location)
            ids, num_before = self.tokenizer.example(prompt, answer)
            tokens = np.array(ids, dtype=np.int32)
            if example.prompt is None:
                pieces = self._divide(tokens)
            else:
                pieces = self._hide_prompt(tokens, num_before)
            if pieces:
                self.examples.append(pieces)

    def _encode(self, examples: Sequence[Example], texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of a text of each example; InputError names the example's location."""
        try:
            return self.tokenizer.encode_batch(texts)
        except InputError:
            for example, text in zip(examples, texts, strict=True):
                try:
                    self.tokenizer.encode_part(text)
                except InputError as error:
                    raise InputError(f"{example.location}: {error}") from error
            raise

    def _check(self, prompt: list[int], answer: list[int], location: str) -> None:
        vocab_size = self.tokenizer.vocab_size
        ids = np.array([*prompt, *answer], dtype=np.int64)
        if (token := id_outside(ids, vocab_size)) is not None:
            raise InputError(
                f"{location}: {self.tokenizer.name} makes token id {token} of it, but has "
                f"{vocab_size} entries (ids 0 to {vocab_size - 1}): its files do not fit together"
            )
        if not answer:
            raise InputError(f"{location}: {self.tokenizer.name} makes no token of the answer")

    def _hide_prompt(self, tokens: np.ndarray, num_hidden: int) -> Pieces:
        """Return the example, cut if it is too long; nothing if no label would be left."""
        if len(tokens) > self.max_length:
            tokens = tokens[: self.max_length]
            self.num_cut += 1
            if num_hidden >= self.max_length:
                self.num_dropped += 1
                return []
        tokens[:num_hidden] = ~tokens[:num_hidden]
        return [tokens]

    def _divide(self, tokens: np.ndarray) -> Pieces:
        """Return the pieces of a text; the last label of a piece is the first input of the next."""
        if len(tokens) > self.max_length:
            self.num_divided += 1
        pieces = []
        for start in range(0, len(tokens) - 1, self.max_length - 1):
            piece = tokens[start : start + self.max_length].copy()
            piece[0] = ~piece[0]
            pieces.append(piece)
        return pieces


def _encode_files(paths: Sequence[str], seq_length: int, tokenizer: Tokenizer) -> list[Pieces]:
    encoder = _Encoder(tokenizer=tokenizer, max_length=seq_length + 1)
    examples = read_examples(paths)
    while batch := list(islice(examples, BATCH)):
        encoder.add(batch)
    if encoder.num_cut:
        logger.info(
            "truncated %d examples that are longer than %d tokens; left out %d of them, because "
            "nothing of their answers remains",
            *(encoder.num_cut, encoder.max_length, encoder.num_dropped),
        )
    if encoder.num_divided:
        logger.info(
            "divided %d texts that are longer than %d tokens",
            *(encoder.num_divided, encoder.max_length),
        )
    if not encoder.examples:
        reason = f"all are longer than --seq-length {seq_length} + 1" if encoder.num_cut else "none"
        raise InputError(f"{', '.join(paths)}: no examples to learn from ({reason})")
    return encoder.examples


def _divide(examples: list[Pieces], split: str) -> list[list[Pieces]]:
    """Return the examples of each split, in the order of `examples`."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(examples))
    examples_by_split = []
    for name, bounds in zip(SPLITS, parse_split(split), strict=True):
        positions = sequence_range(bounds, len(examples)) if bounds else range(0)
        if bounds and not positions:
            logger.info("--split %r leaves %s none of %d examples", split, name, len(examples))
        numbers = np.sort(order[positions.start : positions.stop])
        examples_by_split.append([examples[number] for number in numbers])
    return examples_by_split


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the numbers of the examples in each row, by best-fit decreasing.

    They are placed in order of decreasing length, each into the row in which it leaves the least
    space. The result is deterministic, and has at most 11/9 of the fewest possible rows, plus 4
    (Johnson et al., 1974, Worst-case performance bounds for simple one-dimensional packing
    algorithms).

    A row has space for `capacity` tokens; `lengths` int64 [n] are the tokens of the examples.
    """
    assert not len(lengths) or 0 < lengths.min() <= lengths.max() <= capacity
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}  # rows that have the same number of free tokens
    spaces: list[int] = []  # the keys of `rows_by_space`, sorted
    for example in np.argsort(-lengths, kind="stable").tolist():
        length, space, row = int(lengths[example]), capacity, len(rows)
        best = bisect_left(spaces, length)
        if best == len(spaces):
            rows.append([])
        else:
            space = spaces[best]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[best]
        rows[row].append(example)
        remaining = space - length
        if remaining:
            rows_with_remaining = rows_by_space.setdefault(remaining, [])
            if not rows_with_remaining:
                insort(spaces, remaining)
            rows_with_remaining.append(row)
    return rows
