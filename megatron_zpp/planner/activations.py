"""Measure the memory of activations by running the model on the meta device, without memory.

A block of each kind, and a stage without its blocks, each run one forward and one backward pass on
meta tensors of the compute format, and the live storages are counted after every op. This includes
dropout, rotary positions, gated MLPs, attention, balanced routing, and what ranks of all axes
exchange, without a formula for each.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_zpp.model.attention.prefix_attention import lower_right_mask
from megatron_zpp.model.attention.rotary import GLOBAL, KINDS, rotary_tables
from megatron_zpp.model.attention.sequences import Sequences
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.loss import CPU_CHUNK, DEVICE_CHUNK
from megatron_zpp.model.mlp import FeedForward
from megatron_zpp.model.part import Execution, Part
from megatron_zpp.planner.parts.balanced_routing import BalancedRouting
from megatron_zpp.planner.parts.meta_model import META, largest_block, own_axes
from megatron_zpp.planner.parts.meta_tensors import AsOnCpus, AttentionOfCpus, run_backward
from megatron_zpp.planner.parts.planned_ranks import PlannedRanks
from megatron_zpp.planner.parts.planned_run import PlannedRun
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part
from zeropp.wire import InFlightTensor


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Bytes of one part of the model, without its weights and inputs.

    saved: alive from forward to backward. forward, backward: the peaks during each pass, including
    `saved`, and in backward the gradients of weights. Where a block has an inner unit, these are
    three peaks: before it, in it, after it. The gradients of its weights are counted in it.
    after: alive after backward; of a block, what is alive when those of its inner unit are reduced.
    """

    saved: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The activations of one micro-batch; `stream` is the bytes of the residual between blocks.

    blocks: by the kind of their second branch. After the backward pass of the head, the gradients
    of its weight and of the stream are alive.
    """

    stream: int
    embedding: PassMemory
    blocks: Mapping[type[FeedForward], PassMemory]
    head: PassMemory


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors that ops return in this mode, except those of `excluded`.

    Those on META count with `counts_meta` alone: a run makes some whose memory nothing takes.
    """

    def __init__(self, excluded: Iterable[Tensor] = (), *, counts_meta: bool = False) -> None:
        super().__init__()
        self._counts_meta = counts_meta
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
        return sum(map(torch.UntypedStorage.nbytes, self._storages))

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.current
        return peak

    def exclude_alive(self) -> None:
        """Do not count what is alive now."""
        self._excluded.update(self._storages)
        self._storages.clear()
        self.peak = 0

    def _add(self, tensors: Iterable[Tensor]) -> bool:
        """Count the storages of `tensors`; return whether one of them is new."""
        num_before = len(self._storages)
        for tensor in map(local_part, tensors):
            if isinstance(tensor, InFlightTensor) or tensor.is_meta > self._counts_meta:
                continue  # the first wraps a buffer that is counted
            storage = tensor.untyped_storage()
            if storage not in self._excluded:
                self._storages.add(storage)
        return len(self._storages) != num_before


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What the activations of a stage depend on beside its model.

    dtype: the compute format. selective: the core attention is recomputed. chunk: the number of
    logits that the loss processes at a time. attention_dropout: that of the traced block.
    """

    size: int
    dtype: torch.dtype
    selective: bool
    chunk: int
    attention_dropout: float


def traced(run: PlannedRun, stage: Part) -> Activations:
    """Return the activations of a micro-batch in a stage; equal traces of a model are made once."""
    config, model, ranks, parallel = run.config, run.model, run.ranks, run.ranks.parallel
    micro_batch = MicroBatch(
        size=config.batch.micro_batch_size,
        dtype=run.compute_dtype,
        selective=config.recompute.recompute_granularity == "selective",
        chunk=CPU_CHUNK if run.is_cpu else DEVICE_CHUNK,
        # A GPU's attention regenerates its dropout mask; a CPU's saves all scores.
        attention_dropout=config.model.attention_dropout if run.is_cpu else 0.0,
    )
    splits = ranks.tensor_size, ranks.context_size, parallel.sequence_parallel
    key = (micro_batch, *splits, parallel.cp_comm_type)
    split, blocks = model.split(ranks), {}
    for kind, layer in {type(split.blocks[i].mlp): i for i in stage.layers}.items():
        inner_size = ranks.inner_size if own_axes(split.blocks[layer]) else 1
        make = partial(_trace_block, split, ranks, micro_batch, kind)
        blocks[kind], stream = model.once(make, *key, kind, inner_size)
    make = partial(_trace_ends, model.ends(ranks, stage), ranks, micro_batch)
    embedding, head = model.once(make, *key, stage.is_first, stage.is_last)
    return Activations(stream=stream, embedding=embedding, blocks=blocks, head=head)


class _Segments:
    """The peaks of a pass, divided where it enters and leaves an inner unit."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._peaks: list[int] = []
        self.after = 0

    def end(self, *_: object) -> None:
        """End a part of the pass."""
        self._peaks.append(self._live.take_peak())

    def end_inner(self, weights: Iterable[Tensor]) -> Callable[[Tensor], None]:
        """Return a hook that ends its part, and frees the gradients of its `weights`."""

        def end(_: Tensor) -> None:
            self.end()
            for weight in weights:
                weight.grad = None
            self.after = self._live.current

        return end

    def take(self) -> tuple[int, ...]:
        """Return the peaks of a pass that has ended."""
        self.end()
        peaks, self._peaks = tuple(self._peaks), []
        return peaks


def _trace_block(
    model: GPT, ranks: PlannedRanks, micro_batch: MicroBatch, kind: type[FeedForward]
) -> tuple[PassMemory, int]:
    """Return the activations of a block, and the bytes of the residual stream."""
    config = model.config
    block = largest_block(
        model,
        kind,
        attention_dropout=micro_batch.attention_dropout,
        selective=micro_batch.selective,
    )
    weights = _weights(block, micro_batch.dtype)
    stream = _stream(config, ranks, micro_batch).requires_grad_()
    rotary: tuple[Tensor, ...] = ()
    if config.position_embedding_type == "rope":
        positions = torch.arange(config.seq_length // ranks.context_size, device=META)[None]
        if ranks.context_size > 1:
            positions = positions.expand(micro_batch.size, -1)
        rotary = rotary_tables(config, positions)[GLOBAL]
    sequences = Sequences(
        rotary=(rotary,) * len(KINDS) if rotary else (),
        is_split=ranks.context_size > 1,
        splits_rows=ranks.tensor_size > 1 and ranks.parallel.sequence_parallel,
    )

    def routing() -> BalancedRouting:
        return BalancedRouting(num_tokens=stream.shape[:2].numel(), config=config)

    excluded, inner = [*weights.values(), *block.buffers(), stream, *rotary], own_axes(block)
    with AttentionOfCpus(), AsOnCpus(), LiveBytes(excluded, counts_meta=True) as live:
        if ranks.context_size > 1:  # masks, which all layers share, stay from the first forward
            functional_call(block, weights, (stream, replace(sequences, routing=routing())))
            live.exclude_alive()
        segments = _Segments(live)
        for name, module in block.named_modules():
            if module in inner:
                _divide(module, f"{name}.", weights, segments)
        sequences = replace(sequences, routing=routing())
        result = functional_call(block, weights, (stream, sequences))
        saved, forward = live.current, segments.take()
        gradient = torch.empty_like(result)
        run_backward(result, gradient)
        backward = tuple(peak - result.nbytes for peak in segments.take())
        del gradient
    lower_right_mask.cache_clear()  # a mask without values is of no use to others
    after = max(0, segments.after - result.nbytes)
    memory = PassMemory(saved=saved, forward=forward, backward=backward, after=after)
    return memory, stream.nbytes


def _divide(
    inner: nn.Module, prefix: str, weights: Mapping[str, Tensor], segments: _Segments
) -> None:
    """Divide the passes of a block where they enter and leave a module of it."""
    own = [weight for name, weight in weights.items() if name.startswith(prefix)]

    def enter(_: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
        segments.end()
        inputs[0].register_hook(segments.end_inner(own))

    def leave(_: nn.Module, __: tuple, result: Tensor) -> None:
        segments.end()
        result.register_hook(segments.end)

    inner.register_forward_pre_hook(enter)
    inner.register_forward_hook(leave)


def _trace_ends(
    meta_model: GPT, ranks: PlannedRanks, micro_batch: MicroBatch
) -> tuple[PassMemory, PassMemory]:
    """Return the activations of what a stage has before its blocks, and after them.

    Where another stage has it, activations or their gradients arrive from there, which are not
    counted.
    """
    model = copy.deepcopy(meta_model)
    losses = Execution(cross_entropy=partial(_fake_losses, chunk=micro_batch.chunk))
    model.part = replace(model.part, execution=losses)
    config = model.config
    measured: dict[str, int] = {}
    weights = _weights(model, micro_batch.dtype)
    shape = micro_batch.size, config.seq_length
    tokens = torch.empty(shape, dtype=torch.int64, device=META)
    received = _stream(config, ranks, micro_batch).requires_grad_()
    gradient = _stream(config, ranks, micro_batch)
    excluded = [*weights.values(), *model.buffers(), tokens, received, gradient]
    live = LiveBytes(excluded, counts_meta=True)

    def after_embedding(block: nn.Module, inputs: tuple, stream: Tensor) -> None:
        if not stream.requires_grad:  # as before frozen weights
            stream.requires_grad_()
        measured["embedding_saved"] = live.current
        measured["embedding_forward"] = live.take_peak()
        stream.register_hook(after_head_backward)

    def after_head_backward(_: Tensor) -> None:
        measured["after_head"] = live.current
        measured["head_backward"] = live.take_peak()

    model.blocks[0].register_forward_hook(after_embedding)
    inputs, options = (tokens, tokens, torch.empty(shape, device=META)), {"received": received}
    with AsOnCpus(), live:
        result = functional_call(model, weights, inputs, options)
        saved, forward = live.current, live.take_peak()
        result.backward(None if result.ndim == 0 else gradient)
        embedding_backward = live.take_peak()
    embedding_saved = measured["embedding_saved"]
    embedding = PassMemory(
        saved=embedding_saved,
        forward=(measured["embedding_forward"],),
        backward=(embedding_backward,),
        after=live.current,
    )
    head = PassMemory(
        saved=saved - embedding_saved,
        forward=(forward - embedding_saved,),
        backward=(measured["head_backward"] - embedding_saved,),
        after=measured["after_head"] - embedding_saved,
    )
    return embedding, head


def _fake_losses(logits: Tensor, labels: Tensor, mask: Tensor, chunk: int) -> Tensor:
    """Allocate what `loss.chunked_cross_entropy` does, without computing all rows."""
    rows = max(1, chunk // logits.shape[1])
    fp32_logits = logits[:rows].float()
    assert fp32_logits.dtype == torch.float32
    return logits.new_empty(len(logits), dtype=torch.float32)


def _weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.empty_like(parameter, dtype=dtype, requires_grad=parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def _stream(config: ModelConfig, ranks: PlannedRanks, micro_batch: MicroBatch) -> Tensor:
    """Return a rank's rows of the residual stream, [b, S/C, H], or of S/CT rows."""
    dtype = torch.float32 if config.fp32_residual_connection else micro_batch.dtype
    rows = config.seq_length // ranks.context_size
    if ranks.parallel.sequence_parallel:
        rows //= ranks.tensor_size
    return torch.empty(micro_batch.size, rows, config.hidden_size, dtype=dtype, device=META)
