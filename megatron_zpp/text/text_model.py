"""A model that writes and scores text: whole on one rank, or sharded over all launched ranks.

Rank 0 decides what to do next. The other ranks wait in `TextModel.follow` and take part in each
operation that rank 0 starts, since each of them holds a shard of the weights.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_zpp.checkpoint.open_model import OpenedModel, OpenModel
from megatron_zpp.checkpoint.safetensors_files import DTYPES
from megatron_zpp.model.gpt import GPT
from megatron_zpp.monitor.matmul_rate import warn_if_float32_is_faster
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.config import ParallelConfig, TokenizerConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.text.generate import Piece, Request, check, stream
from megatron_zpp.text.scoring import Passage, Score, score_passages
from megatron_zpp.tokenizer import Tokenizer
from zeropp import InputError, Sharding, ZeroConfig, shard
from zeropp.ranks import Environment, broadcast_object, fail_together, pick_device, world_size
from zeropp.sharding import allocate_parameters

# How long the other ranks wait for rank 0, which may be waiting for a person; the longest timeout
# whose milliseconds fit into 31 bits is 24 days.
WAIT_MINUTES = 60 * 24 * 20
BATCHES_PER_GROUP = 16  # of each rank; passages are sorted by length within a group
PROGRESS_SECONDS = 10

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class TextModelConfig(Section):
    """Which model to load, and how to hold it in memory"""

    load: str | None = flag(
        None, "folder of checkpoints, Hugging Face folder (config.json in it), or .gguf file"
    )
    dtype: str = flag("fp32", "type of the weights and of the arithmetic", choices=tuple(DTYPES))
    deepspeed_config: str | None = flag(
        None, "JSON that sets how several ranks shard the model (default: ZeRO stage 3)"
    )


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model in eval mode with its tokenizer.

    `sharding` is None on one rank. `tokenizer_path` is the folder or file that the tokenizer was
    read from, if known; `files` is a temporary folder that is removed with the model.
    """

    name: str
    model: GPT
    tokenizer: Tokenizer
    sharding: Sharding | None = None
    tokenizer_path: Path | None = None
    files: TemporaryDirectory | None = None

    @property
    def num_positions(self) -> int:
        """The most tokens that the model takes at once."""
        return self.model.config.num_positions

    def context_length(self, seq_length: int | None) -> int:
        """`seq_length`, by default the model's positions; raises InputError if it is more."""
        if seq_length is not None and seq_length > self.num_positions:
            raise InputError(
                f"--seq-length {seq_length}: the model has {self.num_positions} positions"
            )
        return seq_length or self.num_positions

    def check(self, request: Request) -> None:
        """Raise InputError for a request that does not fit the model."""
        check(request, self.num_positions, self.tokenizer.vocab_size)

    def stream(
        self, requests: Sequence[Request], is_cancelled: Callable[[int], bool] = lambda row: False
    ) -> Iterator[Piece]:
        """`megatron_zpp.text.generate.stream`, called on rank 0 only; the other ranks follow.

        Closing the iterator early cancels the remaining texts.
        """
        for request in requests:
            self.check(request)
        return self._pieces(tuple(requests), is_cancelled)

    def complete(self, requests: Sequence[Request]) -> list[str]:
        """The whole text of each request; called on rank 0 only."""
        texts = [""] * len(requests)
        for piece in self.stream(requests):
            texts[piece.row] += piece.text
        return texts

    def score(self, passages: Iterable[Passage], batch_size: int) -> Iterator[Score]:
        """The score of each passage, in order; called on rank 0 only. Logs its progress.

        Raises InputError if the logits are not finite.
        """
        remaining, num_scored, last_log = iter(passages), 0, time.monotonic()
        group_size = BATCHES_PER_GROUP * batch_size * world_size()
        while group := tuple(islice(remaining, group_size)):
            operation = partial(_score_group, passages=group, batch_size=batch_size)
            broadcast_object(operation)
            scores = operation(self)
            if not all(math.isfinite(score.log_probability) for score in scores):
                raise InputError("the model's logits are not finite: its weights are damaged")
            yield from scores
            num_scored += len(scores)
            if time.monotonic() - last_log > PROGRESS_SECONDS:
                last_log = time.monotonic()
                log.info("scoring %d passages", num_scored)

    def follow(self) -> None:
        """Called on every rank but 0: take part in each operation of rank 0 until it closes."""
        while (operation := broadcast_object(None)) is not None:
            operation(self)
        self._remove_files()

    def close(self) -> None:
        """Called on rank 0: end `follow` on the other ranks."""
        broadcast_object(None)
        self._remove_files()

    def release(self) -> None:
        """Free the gathered weights of a sharded model."""
        if self.sharding is not None:
            self.sharding.release()

    def _pieces(
        self, requests: tuple[Request, ...], is_cancelled: Callable[[int], bool]
    ) -> Iterator[Piece]:
        is_closed = False
        broadcast_object(partial(_generate_along, requests=requests))

        def ends(row: int) -> bool:
            return is_closed or is_cancelled(row)

        pieces = stream(self.model, self.tokenizer, requests, is_cancelled=ends)
        try:
            for piece in pieces:  # noqa: UP028, `yield from` would close `pieces`
                yield piece
        finally:
            is_closed = True
            for _ in pieces:  # the cancellation has to reach the other ranks
                pass
            self.release()

    def _remove_files(self) -> None:
        if self.files is not None:
            self.files.cleanup()


def open_text_model(
    config: TextModelConfig,
    tokenizer: TokenizerConfig,
    environment: Environment,
    open_model: OpenModel,
) -> TextModel:
    """Build and load the model on the launched ranks; all of them call this.

    `open_model` opens `--load`. Without tokenizer flags the model's own tokenizer is used. Raises
    InputError.
    """
    if config.load is None:
        raise InputError("--load is missing: name the folder of the model")
    chosen = None if tokenizer == TokenizerConfig() else tokenizer
    warn_if_float32_is_faster(pick_device(environment), DTYPES[config.dtype])
    if environment.world_size == 1:
        if config.deepspeed_config is not None:
            log.info("--deepspeed-config has no effect on one rank: nothing is sharded")
        opened = open_model(config.load, chosen)
        model = _build_on_meta(config, opened).to_empty(device=pick_device(environment))
        opened.fill(model)
        return _text_model(config, opened, model)
    ranks = join_ranks(environment, ParallelConfig(distributed_timeout_minutes=WAIT_MINUTES))
    return shard_text_model(config, chosen, ranks, open_model)


def shard_text_model(
    config: TextModelConfig,
    tokenizer: TokenizerConfig | None,
    ranks: Ranks,
    open_model: OpenModel,
) -> TextModel:
    """The model sharded over ranks that share a process group; all of them call this.

    Raises InputError.
    """
    with fail_together():
        zero = ZeroConfig.from_json(config.deepspeed_config or {}, _json_defaults(config))
    opened = open_model(config.load, tokenizer)
    model = _build_on_meta(config, opened)
    sharding = shard(model, ranks.mesh, zero, cast_forward_inputs=False)
    sharding = allocate_parameters(sharding, zero, ranks.device)
    with fail_together():
        opened.fill(model)
    sharding.weights_changed()
    return _text_model(config, opened, model, sharding)


@contextmanager
def termination_signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, in the main thread.

    Launchers send them to all ranks at once. A rank that follows must not end before rank 0, which
    still needs it to finish its operation.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _generate_along(text_model: TextModel, requests: tuple[Request, ...]) -> None:
    """`TextModel.stream` on the ranks that follow."""
    for _ in stream(text_model.model, text_model.tokenizer, requests):
        pass
    text_model.release()


def _score_group(
    text_model: TextModel, passages: tuple[Passage, ...], batch_size: int
) -> list[Score]:
    """The scores of one group of passages; all ranks call this."""
    scores = score_passages(text_model.model, passages, batch_size)
    text_model.release()
    return scores


def _json_defaults(config: TextModelConfig) -> dict[str, object]:
    """Values of JSON keys, by dotted key, where the JSON does not set them."""
    defaults: dict[str, object] = {"zero_optimization.stage": 3}
    if config.dtype != "fp32":
        defaults[f"{config.dtype}.enabled"] = True
    return defaults


def _build_on_meta(config: TextModelConfig, opened: OpenedModel) -> GPT:
    with torch.device("meta"):
        model = GPT(opened.config, opened.tokenizer.vocab_size)
    return model.to(DTYPES[config.dtype]).requires_grad_(False)


def _text_model(
    config: TextModelConfig, opened: OpenedModel, model: GPT, sharding: Sharding | None = None
) -> TextModel:
    path = opened.tokenizer_config.tokenizer_model
    return TextModel(
        name=Path(config.load).resolve().name,
        model=model.eval(),
        tokenizer=opened.tokenizer,
        sharding=sharding,
        tokenizer_path=None if path is None else Path(path),
        files=opened.files,
    )
