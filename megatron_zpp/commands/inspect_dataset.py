"""Prints what an indexed dataset holds: documents, tokens, lengths, and likely mistakes.

    megatron-zpp inspect --input data/corpus_text_document --histogram lengths.png \\
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt

With a tokenizer, token ids are compared with its vocabulary, ends of documents are counted, and the
largest documents are printed as text. All tokens are read once, a few megabytes at a time;
`--skip-tokens` reads the index only.
"""

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image, ImageDraw

from megatron_zpp.commands.run_command import run_command
from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.settings.config import TokenizerConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.tokenizer import Tokenizer, build_tokenizer
from zeropp.atomic import write_atomically

USAGE = "usage: {program} --input PREFIX [--histogram FILE.png] [flags]"
CHUNK = 1 << 22  # tokens read at once
PROGRESS_SECONDS = 5
SHOWN_TOKENS = 12  # of each of the largest documents
SHOWN_EMPTY = 5  # empty documents that are listed
WIDTH, HEIGHT, MARGIN = 760, 320, 40  # pixels
INK, BAR, PAPER = "#404040", "#4c8bf5", "#ffffff"


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Section):
    """What to inspect"""

    input: str | None = flag(None, "prefix of the dataset, without .bin and .idx", required=True)
    histogram: str | None = flag(None, "write a histogram of the documents' lengths to this .png")
    largest: int = flag(5, "largest documents to list", minimum=0)
    skip_tokens: bool = flag(False, "read the index only, not the tokens")


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """The results of one pass over all tokens.

    `out_of_vocabulary` counts ids outside the tokenizer's vocabulary, `ends` the end-of-document
    id; both are 0 without a tokenizer.
    """

    smallest: int
    largest: int
    out_of_vocabulary: int
    ends: int


class Lengths:
    """The lengths of a dataset's documents.

    `edges` int64 [sequences + 1] is the number of tokens before each sequence, `documents` int64
    [documents] the number of tokens in each document.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        self.dataset = dataset
        self.edges = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
        self.documents = np.diff(self.edges[dataset.document_index])

    @cached_property
    def is_packed(self) -> bool:
        """Whether the sequences are contiguous in the .bin, as every writer leaves them."""
        starts = self.edges[:-1] * self.dataset.dtype.itemsize
        return bool((self.dataset.pointers == starts).all())

    def first_tokens(self, document: int, count: int) -> np.ndarray:
        """The first tokens of a document: at most `count`, of its first sequence with any."""
        first, last = self.dataset.document_index[document : document + 2]
        for sequence in range(first, last):
            if self.dataset.lengths[sequence]:
                return self.dataset.get(sequence)[:count]
        return np.empty(0, dtype=self.dataset.dtype)


def main(argv: Sequence[str], program: str = "megatron-zpp inspect") -> int:
    """Run the command; return the exit status."""
    usage = USAGE.format(program=program)
    return run_command(argv, usage, (InspectConfig, TokenizerConfig), inspect)


def inspect(config: InspectConfig, tokenizer_config: TokenizerConfig) -> None:
    """Print what the dataset holds and write the histogram.

    Raises InputError for a damaged dataset, and if the tokenizer's files cannot be read.
    """
    has_tokenizer = tokenizer_config != TokenizerConfig()
    tokenizer = build_tokenizer(tokenizer_config) if has_tokenizer else None
    dataset = IndexedDataset(config.input)
    lengths = Lengths(dataset)
    for name, value in summary(lengths):
        _print_row(name, value)
    longest_first = np.argsort(-lengths.documents, kind="stable")
    for document in longest_first[: config.largest].tolist():
        _print_row("largest", describe_document(lengths, document, tokenizer))
    problems = list(index_problems(lengths))
    if not config.skip_tokens:
        counts = count_tokens(dataset, tokenizer)
        _print_row("token ids", f"{counts.smallest} to {counts.largest}")
        if tokenizer:
            problems += token_problems(lengths, counts, tokenizer)
    for problem in problems:
        _print_row("problem", problem)
    if not problems:
        print("no problem found")
    if config.histogram:
        image = draw(lengths.documents, dataset.prefix)
        write_atomically(config.histogram, lambda file: image.save(file, "PNG"))
        print(f"wrote {config.histogram}")


def summary(lengths: Lengths) -> Iterator[tuple[str, str]]:
    """(name, value) of each row of counts."""
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
        yield (
            "tokens of a document",
            (
                f"mean {documents.mean():,.1f}, median {shares[1]:,}, 80% of them {shares[0]:,} to "
                f"{shares[2]:,}, at most {documents.max():,}"
            ),
        )


def describe_document(lengths: Lengths, document: int, tokenizer: Tokenizer | None) -> str:
    """One line about a document: its number, its length and its first tokens."""
    ids = lengths.first_tokens(document, SHOWN_TOKENS).tolist()
    beginning = str(ids)
    if tokenizer:
        known = itertools.takewhile(lambda token: 0 <= token < tokenizer.vocab_size, ids)
        beginning = repr(tokenizer.decode(known))
    return f"document {document}, {lengths.documents[document]:,} tokens: {beginning}"


def count_tokens(dataset: IndexedDataset, tokenizer: Tokenizer | None) -> TokenCounts:
    """Read all tokens of the .bin once; progress is printed to standard error."""
    tokens = np.memmap(dataset.bin_path, dtype=dataset.dtype, mode="r")
    limit, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (None, None)
    smallest, largest, out_of_vocabulary, ends = np.inf, -np.inf, 0, 0
    last_print = time.monotonic()
    for start in range(0, len(tokens), CHUNK):
        part = np.asarray(tokens[start : start + CHUNK])
        smallest, largest = min(smallest, part.min()), max(largest, part.max())
        if limit is not None:
            out_of_vocabulary += int(np.count_nonzero((part < 0) | (part >= limit)))
            ends += int(np.count_nonzero(part == eod))
        if time.monotonic() - last_print > PROGRESS_SECONDS:
            last_print = time.monotonic()
            print(f"{start:,} of {len(tokens):,} tokens read", file=sys.stderr, flush=True)
    return TokenCounts(
        smallest=int(smallest),
        largest=int(largest),
        out_of_vocabulary=out_of_vocabulary,
        ends=ends,
    )


def index_problems(lengths: Lengths) -> Iterator[str]:
    """Likely mistakes that the index alone shows, one line for each."""
    empty = np.flatnonzero(lengths.documents == 0)
    if len(empty):
        numbers = ", ".join(str(document) for document in empty[:SHOWN_EMPTY])
        more = " ..." if len(empty) > SHOWN_EMPTY else ""
        yield f"{len(empty):,} of {len(lengths.documents):,} documents are empty: {numbers}{more}"
    num_empty = int(np.count_nonzero(lengths.dataset.lengths == 0))
    if num_empty:
        yield f"{num_empty:,} of {len(lengths.dataset):,} sequences hold no token"
    if not lengths.is_packed:
        yield "the sequences are not contiguous: some tokens are unused or shared"
    if lengths.dataset.dtype.kind == "f":
        yield f"tokens of type {lengths.dataset.dtype.name} are not token ids"


def token_problems(lengths: Lengths, counts: TokenCounts, tokenizer: Tokenizer) -> Iterator[str]:
    """Likely mistakes that comparing the tokens with a tokenizer shows, one line for each."""
    if counts.out_of_vocabulary:
        yield (
            f"{counts.out_of_vocabulary:,} tokens are outside the {tokenizer.vocab_size:,} ids of "
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
    if counts.ends > ended:
        inside = counts.ends - ended
        yield f"the end-of-document id {tokenizer.eod} stands {inside:,} times inside documents"


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
        smallest = 0 if number == 0 else 1 << (number - 1)
        pen.text((left + 2, bottom + 6), _with_unit(smallest), fill=INK)
    pen.line((MARGIN, bottom, WIDTH - MARGIN, bottom), fill=INK)
    return image


def _print_row(name: str, value: str) -> None:
    print(f"{name + ':':<26}{value}")


def _with_unit(number: int) -> str:
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if number >= size:
            return f"{number // size}{unit}"
    return str(number)
