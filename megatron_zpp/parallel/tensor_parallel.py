"""Tensor parallelism (Shoeybi et al. 2019): ranks that see the same samples share out each matrix.

| parameter                                  | split          | other parameters                   |
|--------------------------------------------|----------------|------------------------------------|
| embedding, head                            | by vocabulary  | norms, positions, and the biases   |
| queries, keys and values, with their bias  | by heads       | of layers that are split by        |
| input and gate of the MLP, with their bias | by channels    | columns are whole on every rank    |
| output of attention and MLP                | by columns     |                                    |
| norms of all heads of queries and of keys  | by heads       |                                    |
| B of adapters of the two kinds above those | by rows        | A of the same adapters             |
| A of adapters of the outputs               | by columns     | B of the same adapters             |

The weights are DTensors on the tensor axis when FSDP2 gets them, so that names and shapes in a
checkpoint do not depend on the number of ranks. In a forward pass each layer computes with its
local part, and activations are plain tensors.

With sequence parallelism (Korthikanti et al. 2022) each rank has its own rows of the residual
stream between the layers that are split: what enters one is gathered there, what leaves it is
summed and scattered. Without it, what leaves is summed on every rank.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.layers import Attention
from megatron_zpp.model.lora import LoraLinear, is_adapter
from megatron_zpp.model.loss import head_loss
from megatron_zpp.parallel.collectives import (
    gather_columns,
    gather_rows,
    keep,
    largest,
    moved,
    own_rows,
    sum_rows,
    sum_whole,
)
from megatron_zpp.parallel.peers import Peers
from zeropp.optim.step import gradient_parts, local_part

SPLIT_DIMS = {  # by the last components of a parameter's name
    "tokens.weight": 0, "head.weight": 0,
    "attention.qkv.weight": 0, "attention.qkv.bias": 0, "attention.output.weight": 1,
    "mlp.input.weight": 0, "mlp.input.bias": 0, "mlp.gate.weight": 0, "mlp.gate.bias": 0,
    "mlp.output.weight": 1,
    "attention.queries_norm.weight": 0, "attention.keys_norm.weight": 0,
    "attention.qkv.lora_B.weight": 0, "mlp.input.lora_B.weight": 0, "mlp.gate.lora_B.weight": 0,
    "attention.output.lora_A.weight": 1, "mlp.output.lora_A.weight": 1,
}  # fmt: skip
NORMS_OF_HEADS = re.compile(r"\.attention\.[qk]_norm\.")


@dataclass
class TensorAxis:
    """The ranks that split a model, and whether they split the rows of the stream now."""

    peers: Peers
    sequence_parallel: bool
    splits_rows: bool = field(default=False, init=False)  # in the current forward pass

    def enter(self, x: Tensor) -> Tensor:
        """Return what a layer that is split by rows of its weight computes with, [B, S, H]."""
        if self.splits_rows:
            return moved(x, self.peers, gather_rows, sum_rows)
        return moved(x, self.peers, keep, sum_whole)

    def leave(self, x: Tensor) -> Tensor:
        """Sum x [B, S, H] over the ranks, whose layers are split by columns of their weight."""
        if self.splits_rows:
            return moved(x, self.peers, sum_rows, gather_rows)
        return moved(x, self.peers, sum_whole, keep)

    def leave_embedding(self, x: Tensor) -> Tensor:
        """Sum x [B, S, H] over the ranks, each of which looked up its part of the vocabulary."""
        return moved(x, self.peers, sum_whole, keep)


def split_model(model: GPT, mesh: DeviceMesh, peers: Peers, *, sequence_parallel: bool) -> None:
    """Split a model that is on the meta device over the ranks of the one-axis `mesh`, in place."""
    split_layers(model, TensorAxis(peers, sequence_parallel))
    for parent, name, parameter, part, dim in _parts(model, mesh.size()):
        whole = DTensor.from_local(
            part, mesh, [Shard(dim)], run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
        setattr(parent, name, nn.Parameter(whole, parameter.requires_grad))


def keep_parts(model: GPT, axis: TensorAxis) -> None:
    """Split a model that is on the meta device as `split_model`, for ranks that are only planned.

    Its parameters are a rank's parts, which no process group connects.
    """
    split_layers(model, axis)
    for parent, name, parameter, part, _ in _parts(model, axis.peers.size):
        setattr(parent, name, nn.Parameter(part, parameter.requires_grad))


def split_layers(model: GPT, axis: TensorAxis) -> None:
    """Let the layers of a model compute with a rank's parts of their parameters, in place."""
    for block in model.blocks:
        _split_heads(block.attention, axis)
        block.attention.attend = partial(attend_with_own_dropout, block.attention, axis)
        _split_rows(block.mlp.input)
        if block.mlp.gate is not None:
            _split_rows(block.mlp.gate)
        for part in (block.attention, block.mlp):
            _split_columns(part.output, axis)
            part.register_forward_pre_hook(partial(_enter, axis))
    if model.tokens is not None:
        model.tokens.__class__, model.tokens.axis = PartOfEmbedding, axis
    model.logits, model.loss = partial(_logits, axis), partial(_loss, axis)
    model.register_forward_pre_hook(partial(_choose_rows, axis), with_kwargs=True)
    if model.part.is_first:
        model.blocks[0].register_forward_pre_hook(partial(_take_own_rows, axis))
    if model.part.is_last:
        model.norm.register_forward_hook(partial(_enter_head, axis))


def _parts(
    model: nn.Module, size: int
) -> Iterator[tuple[nn.Module, str, nn.Parameter, Tensor, int]]:
    """Yield owner, name and value of each parameter of `SPLIT_DIMS`, a rank's part, and the dim."""
    for name, parameter in list(model.named_parameters()):
        dim = _split_dim(name)
        if dim is not None:
            shape = list(parameter.shape)
            shape[dim] //= size
            part = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            parent, _, last = name.rpartition(".")
            yield model.get_submodule(parent), last, parameter, part, dim


class PartOfLinear(nn.Linear):
    """A linear layer that computes with this rank's part of its weight, and of its bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_part(self.weight), local_part(self.bias))


class PartOfLoraLinear(LoraLinear, PartOfLinear):
    """A linear layer whose output channels are split, those of its adapter too."""


class PartOfRMSNorm(nn.RMSNorm):
    """A normalization over channels that are split: the squares of all ranks are summed."""

    axis: TensorAxis

    def forward(self, x: Tensor) -> Tensor:
        values, peers = x.float(), self.axis.peers
        squares = values.square().sum(-1, keepdim=True)
        total = moved(squares, peers, sum_whole, sum_whole)
        normalized = values * torch.rsqrt(total / (x.shape[-1] * peers.size) + self.eps)
        return (normalized * local_part(self.weight).float()).to(x.dtype)


class ColumnsOfLinear(nn.Linear):
    """A linear layer whose input channels are split; its bias is whole, and added to the sum."""

    axis: TensorAxis

    def forward(self, x: Tensor) -> Tensor:
        x = self.axis.leave(self.term(x))
        return x if self.bias is None else x + self.bias

    def term(self, x: Tensor) -> Tensor:
        """Return this rank's term of the sum."""
        return F.linear(x, local_part(self.weight))


class ColumnsOfLoraLinear(ColumnsOfLinear, LoraLinear):
    """A linear layer whose input channels are split, those of its adapter too."""

    def term(self, x: Tensor) -> Tensor:
        if self.axis.splits_rows or self.lora_dropout == 0 or not self.training:
            return super().term(x) + self.adapt(x)
        with own_random_numbers(self.axis.peers.own_seed(), x.device):
            return super().term(x) + self.adapt(x)


class PartOfEmbedding(nn.Embedding):
    """An embedding whose vocabulary is split: tokens of other ranks are zeros before the sum."""

    axis: TensorAxis

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_part(self.weight)
        index = tokens - self.axis.peers.place * len(weight)
        is_other = (index < 0) | (index >= len(weight))
        x = F.embedding(index.masked_fill(is_other, 0), weight)
        return self.axis.leave_embedding(x.masked_fill(is_other[..., None], 0))


def attend_with_own_dropout(attention: Attention, axis: TensorAxis, *inputs: Tensor) -> Tensor:
    """Attend with the heads of this rank, dropping other elements than the other ranks do."""
    attend = partial(type(attention).attend, attention)
    if axis.splits_rows or attention.dropout == 0 or not attention.training:
        return attend(*inputs)
    with own_random_numbers(axis.peers.own_seed(), inputs[0].device):
        return attend(*inputs)


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Use a rank's own random numbers inside, and afterwards again the same on all ranks."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def split_cross_entropy(
    peers: Peers, logits: Tensor, labels: Tensor, mask: Tensor | None
) -> Tensor:
    """Return losses fp32 [N] of logits [N, V/T], each rank's part of the vocabulary.

    labels int64 [N] count the whole vocabulary. With a mask [N] the logits become
    mask · (softmax − one-hot) in place.
    """
    columns = labels - peers.place * logits.shape[1]
    is_own = (columns >= 0) & (columns < logits.shape[1])
    columns = columns.masked_fill(~is_own, 0)[:, None]
    values = logits.float()
    row_max = largest(values.amax(dim=1), peers)
    values = values - row_max[:, None]
    label_values = values.gather(1, columns).squeeze(1) * is_own
    exponentials = values.exp_()
    sums = sum_whole(torch.stack((label_values, exponentials.sum(dim=1))), peers)
    label_value, exp_sum = sums.unbind()
    if mask is not None:
        exponentials.mul_((mask / exp_sum)[:, None])
        exponentials.scatter_add_(1, columns, -(mask * is_own)[:, None])
        logits.copy_(exponentials)
    return exp_sum.log() - label_value


def sum_partial_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    peers: Peers,
    device: torch.device,
    *,
    sequence_parallel: bool,
) -> None:
    """Sum the gradients of whole parameters of which each rank has a term, in place."""
    parts = gradient_parts(optimizer, partial_parameters(model, sequence_parallel))
    if not parts:
        return
    total = sum_whole(torch.cat([part.flatten() for part in parts]).to(device), peers)
    for part, sums in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(sums.view(part.shape))


def partial_parameters(model: nn.Module, sequence_parallel: bool) -> Iterator[nn.Parameter]:
    """Yield the whole parameters of which each rank computes a term of the gradient.

    Those are what computes with its own rows or its own heads, and the matrix of an adapter whose
    other is split.
    """
    for name, parameter in model.named_parameters():
        has_rows = sequence_parallel and parameter.ndim == 1 and not name.startswith("embed_norm.")
        has_heads = NORMS_OF_HEADS.search(name) is not None
        is_term = has_rows or has_heads or is_adapter(name)
        if is_term and _split_dim(name) is None and parameter.requires_grad:
            yield parameter


def _split_heads(attention: Attention, axis: TensorAxis) -> None:
    """Let an attention compute with this rank's heads."""
    size, place = axis.peers.size, axis.peers.place
    attention.kv_heads //= size
    _split_rows(attention.qkv)
    for norm in (attention.queries_norm, attention.keys_norm):
        if norm is not None:
            norm.__class__, norm.axis = PartOfRMSNorm, axis
    if attention.scores.alibi_heads is not None:
        num_heads = attention.scores.alibi_heads[0]
        own_heads = num_heads, place * num_heads // size, num_heads // size
        attention.scores = replace(attention.scores, alibi_heads=own_heads)


def _split_rows(layer: nn.Linear) -> None:
    """Let a layer compute with rows of its weight, and of B of its adapter."""
    if isinstance(layer, LoraLinear):
        layer.__class__, layer.lora_B.__class__ = PartOfLoraLinear, PartOfLinear
    else:
        layer.__class__ = PartOfLinear


def _split_columns(layer: nn.Linear, axis: TensorAxis) -> None:
    """Let a layer compute with columns of its weight, and of A of its adapter."""
    layer.axis = axis
    if isinstance(layer, LoraLinear):
        layer.__class__, layer.lora_A.__class__ = ColumnsOfLoraLinear, PartOfLinear
    else:
        layer.__class__ = ColumnsOfLinear


def _split_dim(name: str) -> int | None:
    """Return the dimension in which the parameter of this name is split, if it is."""
    ends = (dim for end, dim in SPLIT_DIMS.items() if f".{name}".endswith(f".{end}"))
    return next(ends, None)


def _enter(axis: TensorAxis, module: nn.Module, inputs: tuple) -> tuple:
    return axis.enter(inputs[0]), *inputs[1:]


def _enter_head(axis: TensorAxis, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    return axis.enter(output)


def _choose_rows(axis: TensorAxis, model: nn.Module, inputs: tuple, options: dict) -> None:
    """Split rows where a loss is computed; logits are, and cached tokens come, for whole rows."""
    labels = inputs[1] if len(inputs) > 1 else options.get("labels")
    divides = inputs[0].shape[1] % axis.peers.size == 0
    axis.splits_rows = axis.sequence_parallel and labels is not None and divides


def _take_own_rows(axis: TensorAxis, block: nn.Module, inputs: tuple) -> tuple | None:
    if not axis.splits_rows:
        return None
    if block.training and max(block.dropout, block.attention.dropout) > 0:
        torch.manual_seed(axis.peers.own_seed())
    x = moved(inputs[0], axis.peers, own_rows, gather_rows)
    return x, *inputs[1:]


def _logits(axis: TensorAxis, x: Tensor, weight: Tensor) -> Tensor:
    return gather_columns(F.linear(x, local_part(weight)), axis.peers)


def _loss(
    axis: TensorAxis, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, _: Callable,
    cap: float | None,
) -> Tensor:  # fmt: skip
    cross_entropy = partial(split_cross_entropy, axis.peers)
    return head_loss(hidden, local_part(weight), labels, mask, cross_entropy, cap)
