"""What is in an indexed dataset: documents, tokens, lengths, and what is odd about them.

    python tools/inspect_dataset.py --input data/corpus_text_document --histogram lengths.png \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

With a tokenizer the ids are compared with its vocabulary, ends of documents are counted, and the
largest documents are quoted. All tokens are read once, a few megabytes at a time; --skip-tokens
leaves that out and looks at the index alone.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # also where nothing is installed

from megatron_zpp.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron_zpp.settings.command_line import HELP, help_text, read, vocabulary  # noqa: E402
from megatron_zpp.settings.config import TokenizerConfig  # noqa: E402
from megatron_zpp.settings.flag import Section, flag  # noqa: E402
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer  # noqa: E402
from zeropp.atomic import write_atomically  # noqa: E402
from zeropp.errors import InputError  # noqa: E402

USAGE = "usage: python tools/inspect_dataset.py --input PREFIX [--histogram FILE.png] [flags]"
CHUNK = 1 << 22  # tokens read at once
PROGRESS_SECONDS = 5
QUOTED = 12  # tokens of a document that are shown
NAMED = 5  # empty documents that are listed
WIDTH, HEIGHT, MARGIN = 760, 320, 40  # pixels
INK, BAR, PAPER = "#404040", "#4c8bf5", "#ffffff"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Section):
    """What to look at"""

    input: str | None = flag(None, "prefix of the dataset, without .bin and .idx")
    histogram: str | None = flag(None, "draw the lengths of the documents into this .png")
    largest: int = flag(5, "largest documents to list", minimum=0)
    skip_tokens: bool = flag(False, "look at the index only, not at the tokens")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What one pass over all tokens found; `ends` counts the id that ends a document."""

    smallest: int
    largest: int
    outside: int
    ends: int


class Lengths:
    """Documents of a dataset and how long they are."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self.dataset = dataset
        self.edges = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
        self.documents = np.diff(self.edges[dataset.document_index])  # tokens of each, int64

    @cached_property
    def is_packed(self) -> bool:
        """Whether the sequences lie in the .bin one after another, as every writer leaves them."""
        starts = self.edges[:-1] * self.dataset.dtype.itemsize
        return bool((self.dataset.pointers == starts).all())

    def tokens_of(self, document: int, count: int) -> np.ndarray:
        """The first tokens of a document, at most `count` of its first sequence with any."""
        first, last = self.dataset.document_index[document : document + 2]
        for sequence in range(first, last):
            if self.dataset.lengths[sequence]:
                return self.dataset.get(sequence)[:count]
        return np.empty(0, dtype=self.dataset.dtype)


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit status, after a line `error: ...` where it is not 0."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sections = (InspectConfig, TokenizerConfig)
    if any(word in HELP for word in argv):
        print(help_text(USAGE, sections))
        return 0
    try:
        typed = {name: given.value for name, given in read(argv, vocabulary(sections)).items()}
        own = {n: typed.pop(n) for n in InspectConfig.__dataclass_fields__.keys() & typed.keys()}
        config, tokenizer = InspectConfig(**own), TokenizerConfig(**typed)
        config.check()
        if not config.input:
            raise InputError("give --input PREFIX")
        inspect(config, build_tokenizer(tokenizer) if typed else None)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130
    return 0


def inspect(config: InspectConfig, tokenizer: Tokenizer | None) -> None:
    """Print what the dataset holds and draw the lengths; InputError if it is damaged."""
    dataset = IndexedDataset(config.input)
    lengths = Lengths(dataset)
    for name, value in summary(lengths):
        print(f"{name + ':':<26}{value}")
    order = np.argsort(-lengths.documents, kind="stable")[: config.largest].tolist()
    for document in order:
        print(f"{'largest:':<26}{quoted(lengths, document, tokenizer)}")
    found = None
    if not config.skip_tokens:
        found = count_tokens(dataset, tokenizer)
        print(f"{'token ids:':<26}{found.smallest} to {found.largest}")
    problems = list(index_problems(lengths))
    if found and tokenizer:
        problems += token_problems(lengths, found, tokenizer)
    for problem in problems:
        print(f"{'problem:':<26}{problem}")
    if not problems:
        print("no problem found")
    if config.histogram:
        image = draw(lengths.documents, dataset.prefix)
        write_atomically(config.histogram, lambda file: _save(image, file))
        print(f"wrote {config.histogram}")


def summary(lengths: Lengths) -> Iterator[tuple[str, str]]:
    """Rows of counts."""
    dataset, documents = lengths.dataset, lengths.documents
    yield "dataset", f"{dataset.prefix}, tokens of type {dataset.dtype.name}"
    yield "documents", f"{len(documents):,}"
    yield "sequences", f"{len(dataset):,}"
    yield "tokens", f"{lengths.edges[-1]:,}"
    if dataset.modes is not None:
        counts = zip(*np.unique(dataset.modes, return_counts=True), strict=True)
        yield "sequences by mode", ", ".join(f"{mode}: {count:,}" for mode, count in counts)
    if len(documents):
        shares = np.percentile(documents, (10, 50, 90), method="nearest").astype(int).tolist()
        yield "tokens of a document", (
            f"mean {documents.mean():,.1f}, median {shares[1]:,}, 80% of them {shares[0]:,} to "
            f"{shares[2]:,}, at most {documents.max():,}"
        )


def quoted(lengths: Lengths, document: int, tokenizer: Tokenizer | None) -> str:
    """One line about a document: its number, its length, how it begins."""
    first = lengths.tokens_of(document, QUOTED).tolist()
    begins = repr(tokenizer.decode(_inside(first, tokenizer))) if tokenizer else f"{first}"
    return f"document {document}, {lengths.documents[document]:,} tokens: {begins}"


def count_tokens(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> Tokens:
    """One pass over the .bin; says on standard error how far it is."""
    tokens = np.memmap(dataset.bin_path, dtype=dataset.dtype, mode="r")
    limit, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (None, None)
    smallest, largest, outside, ends, said = np.inf, -np.inf, 0, 0, time.monotonic()
    for start in range(0, len(tokens), CHUNK):
        part = np.asarray(tokens[start : start + CHUNK])
        smallest, largest = min(smallest, part.min()), max(largest, part.max())
        if limit is not None:
            outside += int(np.count_nonzero((part < 0) | (part >= limit)))
            ends += int(np.count_nonzero(part == eod))
        if time.monotonic() - said > PROGRESS_SECONDS:
            said = time.monotonic()
            print(f"{start:,} of {len(tokens):,} tokens read", file=sys.stderr, flush=True)
    return Tokens(smallest=int(smallest), largest=int(largest), outside=outside, ends=ends)


def index_problems(lengths: Lengths) -> Iterator[str]:
    """What the index alone shows."""
    empty = np.flatnonzero(lengths.documents == 0)
    if len(empty):
        named = ", ".join(map(str, empty[:NAMED])) + (" ..." if len(empty) > NAMED else "")
        yield f"{len(empty):,} of {len(lengths.documents):,} documents are empty: {named}"
    blank = int(np.count_nonzero(lengths.dataset.lengths == 0))
    if blank:
        yield f"{blank:,} of {len(lengths.dataset):,} sequences hold no token"
    if not lengths.is_packed:
        yield "the sequences do not lie one after another: some tokens are unused or shared"
    if lengths.dataset.dtype.kind == "f":
        yield f"tokens of type {lengths.dataset.dtype.name} are no token ids"


def token_problems(lengths: Lengths, found: Tokens, tokenizer: Tokenizer) -> Iterator[str]:
    """What the tokens show beside a tokenizer."""
    if found.outside:
        yield (
            f"{found.outside:,} tokens are outside the {tokenizer.vocab_size:,} ids of "
            f"{tokenizer.name}: the text was preprocessed with another tokenizer"
        )
    if not lengths.is_packed:
        return
    tokens = np.memmap(lengths.dataset.bin_path, dtype=lengths.dataset.dtype, mode="r")
    last = lengths.edges[lengths.dataset.document_index[1:]] - 1
    last = last[lengths.documents > 0]
    ended = sum(
        int(np.count_nonzero(tokens[last[start : start + CHUNK]] == tokenizer.eod))
        for start in range(0, len(last), CHUNK)
    )
    if ended < len(last):
        yield (
            f"{len(last) - ended:,} of {len(last):,} documents do not end with the end-of-document "
            f"id {tokenizer.eod}: preprocess with --append-eod"
        )
    if found.ends > ended:
        yield f"the end-of-document id {tokenizer.eod} stands {found.ends - ended:,} times inside"


def draw(documents: np.ndarray, title: str) -> Image.Image:
    """A histogram: how many documents have 0, 1, 2 to 3, 4 to 7 ... tokens."""
    bins = np.zeros(len(documents), dtype=np.int64)
    bins[documents > 0] = 1 + np.floor(np.log2(documents[documents > 0])).astype(np.int64)
    counts = np.bincount(bins)
    image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((MARGIN, 8), f"documents by their number of tokens: {title}", fill=INK)
    step, bottom = (WIDTH - 2 * MARGIN) / len(counts), HEIGHT - MARGIN
    for number, count in enumerate(counts.tolist()):
        left = MARGIN + number * step
        top = bottom - (bottom - 2 * MARGIN) * count / max(counts.max(), 1)
        if count:
            pen.rectangle((left + 1, top - 1, left + step - 2, bottom), fill=BAR)
            pen.text((left + 2, top - 14), f"{count:,}", fill=INK)
        pen.text((left + 2, bottom + 6), _shown(0 if number == 0 else 1 << (number - 1)), fill=INK)
    pen.line((MARGIN, bottom, WIDTH - MARGIN, bottom), fill=INK)
    return image


def _inside(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids up to the first one that the tokenizer does not know."""
    wrong = (n for n, token in enumerate(ids) if not 0 <= token < tokenizer.vocab_size)
    return ids[: next(wrong, len(ids))]


def _shown(number: int) -> str:
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)


def _save(image: Image.Image, file: BinaryIO) -> None:
    image.save(file, "PNG")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
