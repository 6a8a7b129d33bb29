"""How well a model predicts a text: nats per token, and the perplexity, their exponential.

Documents do not see each other. The first token of a document has no prediction; of a prompt with
its answer, the answer counts and the end of document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.instructions.examples import read_examples
from megatron_zpp.settings.data import EXAMPLES_SUFFIX
from megatron_zpp.text.scoring import Scorer, exponential, windows
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import read_text
from zeropp.errors import InputError

TEXT = ".txt"


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """`loss` is the mean of the `tokens` that were predicted, in nats."""

    documents: int
    tokens: int
    loss: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids; those before `first` are read only."""

    ids: np.ndarray
    first: int = 1


def measure_perplexity(
    scorer: Scorer, path: str, stride: int | None = None, limit: int | None = None
) -> Perplexity:
    """Perplexity of the first `limit` documents of a dataset's prefix, a .txt or a .jsonl.

    Documents longer than the model are read through windows that begin every `stride` tokens
    (windows(); default: one after another). Raises InputError for data that is not what it should.
    """
    stride = scorer.longest if stride is None else stride
    if not 0 < stride <= scorer.longest:
        raise InputError(
            f"--stride {stride}: expected 1 to {scorer.longest}, the tokens that the model takes"
        )
    documents, tokens, total = _Counted(path, scorer.tokenizer, limit), 0, 0.0
    passages = chain.from_iterable(
        windows(document.ids, scorer.longest, stride, document.first) for document in documents
    )
    for score in scorer.score(passages):
        tokens, total = tokens + score.num_tokens, total - score.log_probability
    if not tokens:
        raise InputError(f"{path}: no document has a token to predict")
    loss = total / tokens
    return Perplexity(
        documents=documents.count, tokens=tokens, loss=loss, perplexity=exponential(loss)
    )


class _Counted:
    """The first documents of a path; `count` is how many there have been."""

    def __init__(self, path: str, tokenizer: Tokenizer, limit: int | None) -> None:
        self._documents, self.count = islice(_documents(path, tokenizer), limit), 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self.count += 1
            yield document


def _documents(path: str, tokenizer: Tokenizer) -> Iterator[Document]:
    if path.endswith(EXAMPLES_SUFFIX):
        for example in read_examples([path]):
            prompt = tokenizer.prompt(example.prompt or "")
            ids = [*prompt, *tokenizer.encode(example.answer), tokenizer.eod]
            yield Document(ids=np.array(ids), first=max(1, len(prompt)))
    elif path.endswith(TEXT):
        yield Document(ids=np.array(tokenizer.prompt(read_text(path, "the text"))))
    else:
        yield from _indexed(IndexedDataset(path), tokenizer)


def _indexed(dataset: IndexedDataset, tokenizer: Tokenizer) -> Iterator[Document]:
    bounds = dataset.document_index.tolist()
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        parts = [dataset.get(sequence) for sequence in range(first, last)]
        ids = np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise InputError(
                f"{dataset.bin_path} holds token ids {ids.min()} to {ids.max()}, but the model's "
                f"tokenizer has {tokenizer.vocab_size}: preprocess the text with its tokenizer"
            )
        yield Document(ids=ids)
