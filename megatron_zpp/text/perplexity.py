"""How well a model predicts text: loss in nats per token, and its exponential, the perplexity.

Documents do not attend to each other. The first token of a document is not predicted. In an example
with a prompt, the answer and the end of document are predicted.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from megatron_zpp.data.indexed_dataset import IndexedDataset
from megatron_zpp.data.instructions.examples import read_examples
from megatron_zpp.settings.data import EXAMPLES_SUFFIX
from megatron_zpp.text.scoring import Passage, windows
from megatron_zpp.text.text_model import TextModel
from megatron_zpp.tokenizer import Tokenizer
from megatron_zpp.tokenizer.base import read_text
from zeropp.errors import InputError

TEXT_SUFFIX = ".txt"
LARGEST_LOSS = 700  # nats; the exponential of more does not fit a double


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """`loss` is the mean over the predicted `tokens`, in nats."""

    documents: int
    tokens: int
    loss: float
    perplexity: float


def measure_perplexity(
    model: TextModel,
    path: str,
    *,
    seq_length: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """Perplexity of the first `limit` documents of a dataset's prefix, a .txt or a .jsonl.

    The model sees at most `seq_length` tokens at once (default: its positions). Longer documents
    are read in windows that begin every `stride` tokens (default: `seq_length`). Called on rank 0
    only. Raises InputError for unsuitable lengths and data.
    """
    seq_length = model.context_length(seq_length)
    stride = seq_length if stride is None else stride
    if not 0 < stride <= seq_length:
        raise InputError(
            f"--stride {stride}: expected 1 to {seq_length}, the tokens that the model sees at once"
        )
    num_documents = 0

    def passages() -> Iterator[Passage]:
        nonlocal num_documents
        for document in islice(_documents(path, model.tokenizer), limit):
            num_documents += 1
            yield from windows(document, seq_length, stride)

    tokens, total = 0, 0.0
    for score in model.score(passages(), batch_size):
        tokens += score.num_tokens
        total -= score.log_probability
    if not tokens:
        raise InputError(f"{path}: no document has a token to predict")
    loss = total / tokens
    return Perplexity(
        documents=num_documents,
        tokens=tokens,
        loss=loss,
        perplexity=math.exp(loss) if loss < LARGEST_LOSS else math.inf,
    )


def _documents(path: str, tokenizer: Tokenizer) -> Iterator[Passage]:
    if path.endswith(EXAMPLES_SUFFIX):
        for example in read_examples([path]):
            prompt, answer = map(tokenizer.encode_part, (example.prompt or "", example.answer))
            ids, first = tokenizer.example(prompt, answer)
            yield Passage(ids=np.array(ids), first=first)
    elif path.endswith(TEXT_SUFFIX):
        yield Passage(ids=np.array(tokenizer.prompt(read_text(path, "the text"))))
    else:
        yield from _indexed_documents(IndexedDataset(path), tokenizer)


def _indexed_documents(dataset: IndexedDataset, tokenizer: Tokenizer) -> Iterator[Passage]:
    bounds = dataset.document_index.tolist()
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        sequences = [dataset.get(sequence) for sequence in range(first, last)]
        ids = np.concatenate(sequences, dtype=np.int64) if sequences else np.empty(0, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
            raise InputError(
                f"{dataset.bin_path} holds token ids {ids.min()} to {ids.max()}, but the model's "
                f"tokenizer has {tokenizer.vocab_size}: preprocess the text with its tokenizer"
            )
        yield Passage(ids=ids)
