"""Measure the memory of activations by running the model on fake tensors, without memory.

A block, and the model without its blocks, each run one forward and one backward pass on fake
tensors of the compute format, and the live storages are counted after every op. This includes
dropout, rotary positions, gated MLPs and attention without a formula for each.
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
from megatron_zpp.model.recompute import call_checkpointed
from megatron_zpp.model.rotary import GLOBAL, rotary_tables
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim.step import local_part
from zeropp.wire.in_flight import InFlightTensor


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Bytes of one part of the model, without its weights and inputs.

    saved: alive from forward to backward. forward, backward: the peak during each pass, including
    `saved`, and in backward the gradients of weights. after: alive after backward.
    """

    saved: int
    forward: int
    backward: int
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The activations of one micro-batch; `stream` is the bytes of the residual between blocks.

    After the backward pass of the head, the gradients of its weight and of the stream are alive.
    """

    stream: int
    embedding: PassMemory
    block: PassMemory
    head: PassMemory


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that ops return in this mode, except those of `excluded`."""

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._excluded = weakref.WeakSet(tensor.untyped_storage() for tensor in excluded)
        self._storages: weakref.WeakSet = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable, types: Sequence, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        has_new = self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if has_new or func._schema.is_mutable:  # a mutable op may have resized a storage
            self.peak = max(self.peak, self.current)
        return result

    @property
    def current(self) -> int:
        """Return the bytes that are alive."""
        return sum(storage.nbytes() for storage in self._storages)

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.current
        return peak

    def _add(self, tensors: Iterable[Tensor]) -> bool:
        """Count the storages of `tensors`; return whether one of them is new."""
        num_before = len(self._storages)
        for tensor in map(local_part, tensors):
            if isinstance(tensor, InFlightTensor):
                continue  # it wraps a buffer that is counted
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage not in self._excluded:
                self._storages.add(storage)
        return len(self._storages) != num_before


def trace_activations(
    config: ModelConfig, model: GPT, micro_batch: int, dtype: torch.dtype,
    *, selective: bool, chunk: int,
) -> Activations:  # fmt: skip
    """Return the activations of one micro-batch of `micro_batch` samples.

    model: the model on the meta device; its block with the most trained weights is traced, with the
    dropout of `config`. selective: the core attention is recomputed. chunk: the number of logits
    that the loss processes at a time.
    """
    largest = copy.deepcopy(max(model.blocks, key=_num_trained))
    largest.attention.dropout = config.attention_dropout
    with FakeTensorMode():
        embedding, head = _trace_embedding_and_head(config, model, micro_batch, dtype, chunk)
        block = _trace_block(largest, config, micro_batch, dtype, selective)
        stream = _stream(config, micro_batch, dtype).nbytes
    return Activations(stream=stream, embedding=embedding, block=block, head=head)


def _trace_block(
    block: nn.Module, config: ModelConfig, micro_batch: int, dtype: torch.dtype, selective: bool
) -> PassMemory:
    if selective:
        block.attention.call = call_checkpointed
    weights = _weights(block, dtype)
    stream = _stream(config, micro_batch, dtype).requires_grad_()
    rotary = None
    if config.position_embedding_type == "rope":
        rotary = rotary_tables(config, torch.arange(config.seq_length)[None])[GLOBAL]
    with LiveBytes([*weights.values(), stream, *(rotary or ())]) as live:
        result = functional_call(block, weights, (stream, rotary))
        saved, forward = live.current, live.take_peak()
        gradient = torch.empty_like(result)
        result.backward(gradient)
        backward = live.take_peak() - result.nbytes
        del gradient
        return PassMemory(saved=saved, forward=forward, backward=backward)


def _trace_embedding_and_head(
    config: ModelConfig, full_model: GPT, micro_batch: int, dtype: torch.dtype, chunk: int
) -> tuple[PassMemory, PassMemory]:
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, num_layers=0), full_model.vocab_size)
    is_frozen = not full_model.tokens.weight.requires_grad
    model.requires_grad_(not is_frozen)
    model.blocks_per_call = 1
    model.cross_entropy = partial(_fake_losses, chunk=chunk)
    weights = _weights(model, dtype)
    shape = micro_batch, config.seq_length
    tokens = torch.zeros(shape, dtype=torch.int64)
    measured: dict[str, int] = {}
    live = LiveBytes([*weights.values(), tokens])

    def before_head(_: nn.Module, arguments: tuple[Tensor]) -> None:
        stream = arguments[0]
        if is_frozen:  # as after blocks with adapters
            stream.requires_grad_()
        measured["embedding_saved"] = live.current
        measured["embedding_forward"] = live.take_peak()
        stream.register_hook(after_head_backward)

    def after_head_backward(_: Tensor) -> None:
        measured["after_head"] = live.current
        measured["head_backward"] = live.take_peak()

    model.norm.register_forward_pre_hook(before_head)
    with live:
        loss = functional_call(model, weights, (tokens, tokens, torch.ones(shape)))
        saved, forward = live.current, live.take_peak()
        loss.backward()
        embedding_backward = live.take_peak()
    embedding_saved = measured["embedding_saved"]
    embedding = PassMemory(
        saved=embedding_saved, forward=measured["embedding_forward"],
        backward=embedding_backward, after=live.current,
    )  # fmt: skip
    head = PassMemory(
        saved=saved - embedding_saved, forward=forward - embedding_saved,
        backward=measured["head_backward"] - embedding_saved,
        after=measured["after_head"] - embedding_saved,
    )  # fmt: skip
    return embedding, head


def _fake_losses(logits: Tensor, labels: Tensor, mask: Tensor, chunk: int) -> Tensor:
    """Allocate what `loss.chunked_cross_entropy` does, without computing all rows."""
    rows = max(1, chunk // logits.shape[1])
    fp32_logits = logits[:rows].float()
    assert fp32_logits.dtype == torch.float32
    return torch.empty(len(logits), dtype=torch.float32)


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.empty(parameter.shape, dtype=dtype, requires_grad=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def _stream(config: ModelConfig, micro_batch: int, dtype: torch.dtype) -> Tensor:
    """Return the residual stream [b, S, H]."""
    dtype = torch.float32 if config.fp32_residual_connection else dtype
    return torch.empty(micro_batch, config.seq_length, config.hidden_size, dtype=dtype)
