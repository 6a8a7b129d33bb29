"""Fill-in-the-middle (Bavarian et al. 2022): documents of a sample, cut and put into another order.

The text of a document is cut at two places into prefix, middle and suffix, and becomes one of

    [PREFIX] prefix [SUFFIX] suffix [MIDDLE] middle      (PSM)
    [PREFIX] [SUFFIX] suffix [MIDDLE] prefix middle      (SPM)

so that a model learns to write what is missing between two texts. What becomes of a sample follows
from the seed, the split and the number of the sample, so a resumed run sees the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_zpp.settings.config import FimConfig
from megatron_zpp.tokenizer import Tokenizer
from zeropp.errors import InputError

UNREADABLE = "\ufffd"  # what stands for bytes that are no character, as where one is cut in two


@dataclass(frozen=True, kw_only=True)
class Sentinels:
    """The ids of the tokens around the parts; `split`: of --fim-split-sample, if given."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    split: int | None

    @classmethod
    def of(cls, config: FimConfig, tokenizer: Tokenizer) -> "Sentinels":
        """Raises InputError for names that are no tokens of the tokenizer."""
        names = {
            "prefix": config.fim_prefix_token,
            "middle": config.fim_middle_token,
            "suffix": config.fim_suffix_token,
            "pad": config.fim_pad_token,
        }
        ids = {name: tokenizer.id_of(text) for name, text in names.items()}
        missing = [
            f"--fim-{name}-token {names[name]}" for name, token in ids.items() if token is None
        ]
        split = None
        if config.fim_split_sample is not None:
            split = tokenizer.id_of(config.fim_split_sample)
            missing += [f"--fim-split-sample {config.fim_split_sample}"] * (split is None)
        if missing:
            raise InputError(
                f"--fim-rate {config.fim_rate:g}: {tokenizer.name} has no token for "
                f"{', '.join(missing)}: name tokens that it has, as <extra_id_0> to <extra_id_3> "
                "with --vocab-extra-ids 4"
            )
        return cls(**ids, split=split)


def filled_in_the_middle(
    datasets: Sequence, config: FimConfig, tokenizer: Tokenizer, seed: int
) -> "tuple[FillInTheMiddle | None, ...]":
    """Return the datasets of all splits with their documents in another order; None stays None.

    Raises InputError if the tokenizer lacks a token that is needed.
    """
    sentinels = Sentinels.of(config, tokenizer)
    return tuple(
        dataset and FillInTheMiddle(dataset, config, tokenizer, sentinels, (seed, number))
        for number, dataset in enumerate(datasets)
    )


class FillInTheMiddle:
    """The samples of a dataset, with each document in another order at the rate of `config`.

    Samples keep their length: their ends are cut off, or padded without loss. Documents that are
    not text, as where a sample begins within a character, stay as they are.
    """

    hides_labels = True

    def __init__(
        self,
        dataset: Sequence,
        config: FimConfig,
        tokenizer: Tokenizer,
        sentinels: Sentinels,
        seed: tuple[int, int],
    ) -> None:
        if config.fim_fragment_rate is None:
            config = replace(config, fim_fragment_rate=config.fim_rate)
        self.dataset, self.config, self.tokenizer = dataset, config, tokenizer
        self.sentinels, self.seed = sentinels, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return sample `index`: dict(tokens int64 [S + 1]); complements where it is padded."""
        tokens = self.dataset[index]["tokens"]
        random = np.random.default_rng((*self.seed, index))
        parts = []
        for document in _split_at(tokens, self.tokenizer.eod):
            body, end = _without_end(document, self.tokenizer.eod)
            parts += [self._document(body, random), end]
        changed = np.concatenate(parts)[: len(tokens)]
        padding = np.full(len(tokens) - len(changed), ~self.sentinels.pad, dtype=np.int64)
        return {"tokens": np.concatenate((changed, padding))}

    def _document(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a document without its end, or its parts, in another order if it is their turn."""
        split = self.sentinels.split
        if split is None or split not in tokens:
            return self._reordered(tokens, self.config.fim_rate, random)
        if random.random() >= self.config.fim_rate:
            return tokens
        parts = []
        for part in _split_at(tokens, split):
            body, end = _without_end(part, split)
            parts += [self._reordered(body, self.config.fim_fragment_rate, random), end]
        return np.concatenate(parts)

    def _reordered(
        self, tokens: np.ndarray, rate: float, random: np.random.Generator
    ) -> np.ndarray:
        """Return prefix, suffix and middle of a text with probability `rate`, else the text."""
        if not len(tokens) or random.random() >= rate:
            return tokens
        text, unchanged = self.tokenizer.decode(tokens.tolist()), self.config.fim_no_prefix
        is_kept = unchanged is not None and text.startswith(unchanged)
        if is_kept or UNREADABLE in text:
            return tokens
        first, last = np.sort(random.integers(0, len(text), size=2, endpoint=True)).tolist()
        cut = (text[:first], text[first:last], text[last:])
        prefix, middle, suffix = map(self.tokenizer.encode_part, cut)
        ids = self.sentinels
        if random.random() < self.config.fim_spm_rate:
            order = [ids.prefix, ids.suffix, *suffix, ids.middle, *prefix, *middle]
        else:
            order = [ids.prefix, *prefix, ids.suffix, *suffix, ids.middle, *middle]
        return np.array(order, dtype=np.int64)


def _split_at(tokens: np.ndarray, end: int) -> list[np.ndarray]:
    """Return the parts of tokens [n] that end with `end`, and what is behind the last."""
    return np.split(tokens, np.flatnonzero(tokens == end) + 1)


def _without_end(tokens: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [n] without their end, and the end, which may be empty."""
    size = len(tokens) - (len(tokens) > 0 and tokens[-1] == end)
    return tokens[:size], tokens[size:]
