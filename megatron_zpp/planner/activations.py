"""Bytes of activations, found by running the GPT's own code on tensors without memory.

A block, and the model without its blocks, each do one forward and one backward pass on fake tensors
of the compute format, and the storages that are alive are counted after every op. So dropout,
rotary positions, gated MLPs and what attention keeps are in it without a formula for each.
"""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layers import rotary_table
from megatron_zpp.model.recompute import call_checkpointed
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim.step import local_part


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Bytes of one part of the model, its weights not counted, nor what it was given.

    kept: alive after forward until backward. forward, backward: the most during each, `kept`
    included; in backward the gradients of weights too. after: what is left after backward.
    """

    kept: int
    forward: int
    backward: int
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """One micro-batch's; `stream` is the residual between blocks.

    After the head's backward pass its weight's gradient and that of the stream are left.
    """

    stream: int
    embedding: Passes
    block: Passes
    head: Passes


class LiveBytes(TorchDispatchMode):
    """Counts the storages of tensors that ops return while it is on; not those of `apart`."""

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._apart = weakref.WeakSet(one.untyped_storage() for one in apart)
        self._storages: weakref.WeakSet = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if made or func._schema.is_mutable:  # into a storage that may have been given memory
            self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        """Bytes that are alive."""
        return sum(storage.nbytes() for storage in self._storages)

    def lap(self) -> int:
        """The peak since the last call."""
        peak, self.peak = self.peak, self.now
        return peak

    def _add(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these has a storage that was not known."""
        before = len(self._storages)
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            if tensor.device.type != "meta" and storage not in self._apart:
                self._storages.add(storage)
        return len(self._storages) != before


def trace(
    config: ModelConfig, model: GPT, micro_batch: int, dtype: torch.dtype,
    *, selective: bool, chunk: int,
) -> Activations:  # fmt: skip
    """One micro-batch of `micro_batch` samples; `selective`: the core attention is recomputed.

    model: as it is trained, on the meta device; its block with the most trained weights is traced,
    with the dropout of `config`. chunk: how many logits the loss works on at a time.
    """
    largest = copy.deepcopy(max(model.blocks, key=_num_trained))
    largest.attention.dropout = config.attention_dropout
    with FakeTensorMode():
        embedding, head = _trace_ends(config, model, micro_batch, dtype, chunk)
        block = _trace_block(largest, config, micro_batch, dtype, selective)
        stream = _stream(config, micro_batch, dtype).nbytes
    return Activations(stream=stream, embedding=embedding, block=block, head=head)


def _trace_block(
    block: nn.Module, config: ModelConfig, micro_batch: int, dtype: torch.dtype, selective: bool
) -> Passes:
    if selective:
        block.attention.call = call_checkpointed
    weights = _weights(block, dtype)
    given = _stream(config, micro_batch, dtype).requires_grad_()
    rotary = None
    if config.position_embedding_type == "rope":
        positions = torch.arange(config.seq_length)[None]
        rotary = rotary_table(positions, int(config.head_dim * config.rotary_percent), 1.0)
    with LiveBytes([*weights.values(), given, *(rotary or ())]) as live:
        result = functional_call(block, weights, (given, rotary))
        kept, forward = live.now, live.lap()
        gradient = torch.empty_like(result)
        result.backward(gradient)
        backward = live.lap() - result.nbytes
        del gradient
        return Passes(kept=kept, forward=forward, backward=backward)


def _trace_ends(
    config: ModelConfig, whole: GPT, micro_batch: int, dtype: torch.dtype, chunk: int
) -> tuple[Passes, Passes]:
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, num_layers=0), whole.vocab_size)
    is_frozen = not whole.tokens.weight.requires_grad
    model.requires_grad_(not is_frozen)
    model.blocks_per_call = 1
    model.cross_entropy = partial(_losses, chunk=chunk)
    weights = _weights(model, dtype)
    shape = micro_batch, config.seq_length
    tokens = torch.zeros(shape, dtype=torch.int64)
    marks: dict[str, int] = {}
    live = LiveBytes([*weights.values(), tokens])

    def between(_: nn.Module, arguments: tuple[Tensor]) -> None:
        stream = arguments[0]
        if is_frozen:  # blocks with adapters make it trained
            stream.requires_grad_()
        marks["embedded"], marks["embedding"] = live.now, live.lap()
        stream.register_hook(returned)

    def returned(_: Tensor) -> None:
        marks["headless"], marks["head"] = live.now, live.lap()

    model.norm.register_forward_pre_hook(between)
    with live:
        loss = functional_call(model, weights, (tokens, tokens, torch.ones(shape)))
        kept, forward = live.now - marks["embedded"], live.lap() - marks["embedded"]
        loss.backward()
        last = live.lap()
    embedding = Passes(
        kept=marks["embedded"], forward=marks["embedding"], backward=last, after=live.now
    )
    return embedding, Passes(
        kept=kept, forward=forward, backward=marks["head"] - marks["embedded"],
        after=marks["headless"] - marks["embedded"],
    )  # fmt: skip


def _losses(logits: Tensor, labels: Tensor, mask: Tensor, chunk: int) -> Tensor:
    """Use the memory of `loss.chunked_cross_entropy`, without computing all rows."""
    rows = max(1, chunk // logits.shape[1])
    wide = logits[:rows].float()
    assert wide.dtype == torch.float32
    return torch.empty(len(logits), dtype=torch.float32)


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.empty(one.shape, dtype=dtype, requires_grad=one.requires_grad)
        for name, one in module.named_parameters()
    }


def _stream(config: ModelConfig, micro_batch: int, dtype: torch.dtype) -> Tensor:
    """The residual stream [B, S, H]."""
    wide = torch.float32 if config.fp32_residual_connection else dtype
    return torch.empty(micro_batch, config.seq_length, config.hidden_size, dtype=wide)
