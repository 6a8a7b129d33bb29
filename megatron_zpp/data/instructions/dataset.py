"""Rows of S + 1 tokens packed from examples, with the loss on what is to be learned.

An example is its prompt, its answer and the end of document, after what the tokenizer puts before
every text; a prompt is encoded by itself, as when a model is asked. Tokens to be read only travel
as the complement (~id, negative) of their id: as a label such a token has no loss. These are
prompts, the first token of every example, which follows a foreign one, and what fills a row up:
complements of the end of document, which end none.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from megatron_zpp.data.gpt_dataset import refuse_split
from megatron_zpp.data.instructions.examples import Example, read_examples
from megatron_zpp.data.instructions.packed_rows import pack
from megatron_zpp.data.split import SPLITS, parse_split, sequence_range
from megatron_zpp.settings.config import DataConfig
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError

AT_ONCE = 1000  # examples given to the tokenizer
HELD_OUT_SEED = 20240501  # not --seed: runs that differ in it measure the same examples

logger = logging.getLogger("megatron_zpp")

Pieces = list[np.ndarray]  # of one example: int32 [length], all that fit in a row


class InstructionDataset:
    """At least `size` rows (None: each once); `hides_labels`: complements mark what has no loss.

    With `shuffles` every epoch has an order of its own, else all have the same one.
    """

    hides_labels = True

    def __init__(
        self, pieces: Pieces, seq_length: int, eod: int, size: int | None, *, seed: int,
        shuffles: bool,
    ) -> None:  # fmt: skip
        self._length, self._filling = seq_length + 1, ~eod
        lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
        rows = pack(lengths, self._length)
        self.num_rows, self.fill = len(rows), lengths.sum() / (len(rows) * self._length)
        # One array each: workers share them, where lists of Python's would be copied bit by bit.
        self._examples = np.concatenate([pieces[one] for row in rows for one in row])
        sizes = [sum(len(pieces[one]) for one in row) for row in rows]
        self._edges = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        epochs = range(-(-(size or 1) // self.num_rows))
        drawn = [np.random.default_rng((seed, epoch if shuffles else 0)) for epoch in epochs]
        self._order = np.concatenate([one.permutation(self.num_rows) for one in drawn])

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Row `index`: dict(tokens int64 [S + 1]), of which negative ones are complements."""
        row = self._order[index]
        tokens = np.full(self._length, self._filling, dtype=np.int64)
        found = self._examples[self._edges[row] : self._edges[row + 1]]
        tokens[: len(found)] = found
        return {"tokens": tokens}


def build_instructions(
    data: DataConfig,
    seq_length: int,
    sizes: tuple[int | None, int | None, int | None],
    seed: int,
    tokenizer: Tokenizer,
) -> tuple[InstructionDataset | None, ...]:
    """Training, validation and test rows, at least `sizes`; None for a split without examples.

    `--split` holds out whole examples, drawn from all of them, the same ones in every run. Raises
    InputError for files, lines, fields and token ids that are wrong, and without any example.
    """
    if data.data_path is not None:
        parts = _held_out(_encoded(data.data_path, seq_length, tokenizer), data.split)
    else:
        refuse_split(data.split)
        paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
        parts = [_encoded(path, seq_length, tokenizer) if path else [] for path in paths]
    datasets = []
    for split, examples, size in zip(SPLITS, parts, sizes, strict=True):
        pieces = [piece for example in examples for piece in example]
        if not pieces or size == 0:
            datasets.append(None)
            continue
        dataset = InstructionDataset(
            pieces, seq_length, tokenizer.eod, size, seed=seed, shuffles=split == SPLITS[0]
        )
        logger.info(
            "%s: %d examples in %d rows of %d tokens, %.1f%% of which they fill",
            *(split, len(examples), dataset.num_rows, seq_length + 1, 100 * dataset.fill),
        )
        datasets.append(dataset)
    return tuple(datasets)


@dataclass(kw_only=True)
class _Encoder:
    """Examples to pieces of at most `longest` tokens; counts what did not fit."""

    tokenizer: Tokenizer
    longest: int
    cut: int = 0
    divided: int = 0
    lost: int = 0
    found: list[Pieces] = field(default_factory=list)

    def add(self, examples: Sequence[Example]) -> None:
        """Encode the examples and keep what fits."""
        opening = list(self.tokenizer.opening)
        texts = [example.prompt or "" for example in examples]
        ids = self._ids(examples, texts + [example.answer for example in examples])
        for example, prompt, answer in zip(
            examples, ids[: len(examples)], ids[len(examples) :], strict=True
        ):
            self._check(prompt + answer, answer, example.where)
            prompt = opening + prompt
            tokens = np.array([*prompt, *answer, self.tokenizer.eod], dtype=np.int32)
            if example.prompt is None:
                pieces = list(self._divided(tokens))
            else:
                pieces = list(self._answered(tokens, max(len(prompt), 1)))
            if pieces:
                self.found.append(pieces)

    def _ids(self, examples: Sequence[Example], texts: Sequence[str]) -> list[list[int]]:
        try:
            return self.tokenizer.encode_batch(texts)
        except InputError as error:
            for number, text in enumerate(texts):
                try:
                    self.tokenizer.encode(text)
                except InputError as one:
                    raise InputError(f"{examples[number % len(examples)].where}: {one}") from error
            raise

    def _check(self, ids: list[int], answer: list[int], where: str) -> None:
        size = self.tokenizer.vocab_size
        wrong = [one for one in ids if not 0 <= one < size]
        if wrong:
            raise InputError(
                f"{where}: {self.tokenizer.name} makes token id {wrong[0]} of it, but has {size} "
                f"entries (ids 0 to {size - 1}): its files do not fit together"
            )
        if not answer:
            raise InputError(f"{where}: {self.tokenizer.name} makes no token of the answer")

    def _answered(self, tokens: np.ndarray, hidden: int) -> Iterator[np.ndarray]:
        """The example, cut if it is too long; nothing if no label would be left."""
        if len(tokens) > self.longest:
            tokens = tokens[: self.longest]
            self.cut += 1
            if hidden >= self.longest:
                self.lost += 1
                return
        tokens[:hidden] = ~tokens[:hidden]
        yield tokens

    def _divided(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """A text in pieces; the last label of one is the first input of the next."""
        self.divided += len(tokens) > self.longest
        for start in range(0, len(tokens) - 1, self.longest - 1):
            piece = tokens[start : start + self.longest].copy()
            piece[0] = ~piece[0]
            yield piece


def _encoded(paths: Sequence[str], seq_length: int, tokenizer: Tokenizer) -> list[Pieces]:
    encoder = _Encoder(tokenizer=tokenizer, longest=seq_length + 1)
    examples = read_examples(paths)
    while some := list(islice(examples, AT_ONCE)):
        encoder.add(some)
    if encoder.cut:
        logger.info(
            "%d examples are longer than %d tokens and are cut; %d of them are left out: nothing "
            "of their answers remains",
            *(encoder.cut, encoder.longest, encoder.lost),
        )
    if encoder.divided:
        logger.info(
            "%d texts are longer than %d tokens and are divided",
            *(encoder.divided, encoder.longest),
        )
    if not encoder.found:
        why = f"all are longer than --seq-length {seq_length} + 1" if encoder.cut else "none"
        raise InputError(f"{', '.join(paths)}: no examples to learn from ({why})")
    return encoder.found


def _held_out(found: list[Pieces], split: str) -> list[list[Pieces]]:
    """The examples of each split."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(len(found))
    parts = []
    for name, bounds in zip(SPLITS, parse_split(split), strict=True):
        numbers = sequence_range(bounds, len(found)) if bounds else range(0)
        if bounds and not numbers:
            logger.info("--split %r leaves %s none of %d examples", split, name, len(found))
        parts.append([found[one] for one in np.sort(order[numbers.start : numbers.stop])])
    return parts
