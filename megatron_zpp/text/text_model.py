"""A model from a folder, ready to write: whole on one rank, or sharded over all that were launched.

The first rank hears what is wanted, from a person or over HTTP. The others wait in `follow`, and
take part in what it begins: each of them holds a shard of the weights.
"""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_zpp.checkpoint.safetensors_files import DTYPES
from megatron_zpp.model.gpt import GPT
from megatron_zpp.models.open_model import OpenedModel, open_model
from megatron_zpp.parallel.mesh import Ranks, join_ranks
from megatron_zpp.settings.config import ParallelConfig, TokenizerConfig
from megatron_zpp.settings.flag import Section, flag
from megatron_zpp.text.generate import Piece, Request, check, stream
from megatron_zpp.tokenizer import Tokenizer
from zeropp import InputError, Sharding, ZeroConfig, shard
from zeropp.ranks.coordination import broadcast_object, fail_together
from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment
from zeropp.sharding.shard import allocate_parameters

PATIENCE = 60 * 24 * 20  # minutes that ranks wait for the first: a person may think; in ms 31 bits

log = logging.getLogger("megatron_zpp")


@dataclass(frozen=True, kw_only=True)
class TextModelConfig(Section):
    """Which model writes, and how it is held"""

    load: str | None = flag(
        None, "folder of checkpoints, Hugging Face folder (config.json in it), or .gguf file"
    )
    dtype: str = flag("fp32", "type of the weights and of the arithmetic", choices=tuple(DTYPES))
    deepspeed_config: str | None = flag(
        None, "JSON that says how several ranks shard the model (default: ZeRO stage 3)"
    )


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model and its tokenizer; `chat_folder` is where the files of its tokenizer lie, if known.

    `sharding` is None on one rank. `files` is the folder, if it goes with the model.
    """

    name: str
    model: GPT
    tokenizer: Tokenizer
    sharding: Sharding | None = None
    chat_folder: Path | None = None
    files: TemporaryDirectory | None = None

    def check(self, request: Request) -> None:
        """Raise InputError if the request cannot be met."""
        check(request, self.model.config.num_positions, self.tokenizer.vocab_size)

    def stream(
        self, requests: Sequence[Request], is_cancelled: Callable[[int], bool] = lambda row: False
    ) -> Iterator[Piece]:
        """`megatron_zpp.text.generate.stream`, called on the first rank only; the others follow.

        Whoever stops listening cancels what is left.
        """
        for request in requests:
            self.check(request)
        return self._pieces(tuple(requests), is_cancelled)

    def follow(self) -> None:
        """On every rank but the first: take part in all that it does, until it closes.

        Signals to end are the first rank's to answer. To be called in the main thread.
        """
        with _deaf():
            while (requests := broadcast_object(None)) is not None:
                for _ in stream(self.model, self.tokenizer, requests):
                    pass
                self._release()
        self._remove_files()

    def close(self) -> None:
        """On the first rank: let the others end."""
        broadcast_object(None)
        self._remove_files()

    def _pieces(
        self, requests: tuple[Request, ...], is_cancelled: Callable[[int], bool]
    ) -> Iterator[Piece]:
        left = False
        broadcast_object(requests)
        pieces = stream(
            self.model, self.tokenizer, requests,
            is_cancelled=lambda row: left or is_cancelled(row),
        )  # fmt: skip
        try:
            yield from _lent(pieces)
        finally:
            left = True
            for _ in pieces:  # the other ranks must hear of it
                pass
            self._release()

    def _remove_files(self) -> None:
        if self.files is not None:
            self.files.cleanup()

    def _release(self) -> None:
        if self.sharding is not None:
            self.sharding.release()


def open_text_model(
    config: TextModelConfig, tokenizer: TokenizerConfig, environment: Environment
) -> TextModel:
    """Build and fill the model on the ranks that were launched; all of them call it.

    A tokenizer that no flag names is the one that the model comes with. Raises InputError.
    """
    if config.load is None:
        raise InputError("--load is missing: name the folder of the model")
    chosen = None if tokenizer == TokenizerConfig() else tokenizer
    if environment.world_size == 1:
        if config.deepspeed_config is not None:
            log.info("--deepspeed-config has no effect on one rank: nothing is sharded")
        opened = open_model(config.load, chosen)
        return _text_model(config, opened, _built(config, opened, pick_device(environment)))
    ranks = join_ranks(environment, ParallelConfig(distributed_timeout_minutes=PATIENCE))
    return shard_text_model(config, chosen, ranks)


def shard_text_model(
    config: TextModelConfig, chosen: TokenizerConfig | None, ranks: Ranks
) -> TextModel:
    """The model sharded over ranks that have met; all of them call it. Raises InputError."""
    with fail_together():
        zero = ZeroConfig.from_json(config.deepspeed_config or {}, _defaults(config))
    opened = open_model(config.load, chosen)
    model = _on_meta(config, opened)
    sharding = shard(model, ranks.mesh, zero, cast_forward_inputs=False)
    sharding = allocate_parameters(sharding, zero, ranks.device)
    with fail_together():
        opened.fill(model)
    sharding.weights_changed()
    return _text_model(config, opened, model.eval(), sharding)


def _lent(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces; `pieces` itself is not closed by whoever stops listening."""
    for piece in pieces:  # noqa: UP028, `yield from` would close it
        yield piece


@contextmanager
def _deaf() -> Iterator[None]:
    """Launchers tell all ranks to end at once, which would leave the first one waiting for us."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _defaults(config: TextModelConfig) -> dict[str, object]:
    """What the flags say of the JSON, by dotted key."""
    settled: dict[str, object] = {"zero_optimization.stage": 3}
    if config.dtype != "fp32":
        settled[f"{config.dtype}.enabled"] = True
    return settled


def _on_meta(config: TextModelConfig, opened: OpenedModel) -> GPT:
    with torch.device("meta"):
        model = GPT(opened.config, opened.tokenizer.vocab_size)
    return model.to(DTYPES[config.dtype]).requires_grad_(False)


def _built(config: TextModelConfig, opened: OpenedModel, device: torch.device) -> GPT:
    model = _on_meta(config, opened).to_empty(device=device)
    opened.fill(model)
    return model.eval()


def _text_model(
    config: TextModelConfig, opened: OpenedModel, model: GPT, sharding: Sharding | None = None
) -> TextModel:
    folder = opened.tokenizer_config.tokenizer_model
    return TextModel(
        name=Path(config.load).resolve().name,
        model=model,
        tokenizer=opened.tokenizer,
        sharding=sharding,
        chat_folder=None if folder is None else Path(folder),
        files=opened.files,
    )
