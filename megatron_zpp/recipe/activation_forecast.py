"""The messages that a step will send along all axes but the data axis, computed from shapes.

What is sent is counted where it is sent (`RankGroup`), and tests compare the two.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import gcd

import torch
from torch import nn

from megatron_zpp.model.attention.attention import CoreAttention
from megatron_zpp.model.attention.latent_attention import LatentAttention
from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.mlp import feed_forward
from megatron_zpp.model.part import Execution, Part
from megatron_zpp.model.tensor_parallel import partial_parameters
from megatron_zpp.parallel.mesh import Ranks
from megatron_zpp.recipe.pipeline import Pipeline
from zeropp import Sharding
from zeropp.optim import local_part
from zeropp.wire import AXES, EXCHANGE, GATHER, HOPS, REDUCE, Message, RankGroup, sum_of

FP32_BYTES = 4
SUM = (EXCHANGE, GATHER)  # of parts of a sum on all ranks, and then of the sums


@dataclass(frozen=True, kw_only=True)
class MovesBack:
    """How many gradients a stage moves: at entries of layers by their channels, inside attention,
    and at exits.
    """

    entries: Counter[int]
    inside: int
    exits: int


def activation_traffic(
    sharding: Sharding, ranks: Ranks, micro_batch_size: int, num_micro_batches: int
) -> dict[tuple[str, str], int]:
    """Return the bytes that this rank will send in a step, by (axis, group)."""
    model = sharding.model
    forecast = Forecast(model, ranks, micro_batch_size, sharding.compute_dtype)
    roots = model.roots if isinstance(model, Pipeline) else (model,)
    total = sum_of(message for root in roots for message in forecast.messages(root.part))
    total = Counter({key: num_micro_batches * sent for key, sent in total.items()})
    partial = partial_parameters(model)
    is_tied = isinstance(model, Pipeline) and model.ties_ends
    tied = (model.tokens.weight,) if is_tied else ()
    total.update(sum_of(forecast.gradients(map(_num_local, partial), map(_num_local, tied))))
    return {(axis, group): total[axis, group] for axis in AXES for group in HOPS}


class Forecast:
    """What this rank sends others, in terms of the model's sizes.

    `ranks` may be of a run that is only planned. `model` has the layers of their stages, which
    `execution` runs, by default the model's own.
    """

    def __init__(
        self,
        model: GPT | Pipeline,
        ranks: Ranks,
        micro_batch_size: int,
        compute_dtype: torch.dtype,
        execution: Execution | None = None,
    ) -> None:
        self.model, self.ranks, self.execution = model, ranks, execution or model.part.execution
        self.config = config = model.config
        self.compute_dtype, self.width = compute_dtype, compute_dtype.itemsize
        self.residual_width = FP32_BYTES if config.fp32_residual_connection else self.width
        self.tokens = micro_batch_size * config.seq_length // ranks.context_size
        self.hidden, self.splits_rows = config.hidden_size, model.part.splits_rows
        self.elements = self.tokens * self.hidden  # of the residual stream

    def messages(self, stage: Part) -> Iterator[Message]:
        """Yield what a micro-batch sends on its way through a stage and back."""
        if self.ranks.tensor_size > 1:
            yield from self._tensor(stage, self.ranks.tensor_group)
        if self.ranks.context_size > 1:
            yield from self._context(stage, self.ranks.context_group)
        if self.ranks.pipeline_size > 1:
            yield from self._pipeline(stage)
        kinds = dict.fromkeys(feed_forward(self.config, layer) for layer in stage.layers)
        for kind in kinds:
            yield from kind.messages(self, stage)

    def gradients(self, partial: Iterable[int], tied: Iterable[int]) -> Iterator[Message]:
        """Yield what is sent once per step: gradients that ranks of an axis have parts of.

        partial: numbers of gradients that ranks of the tensor axis have terms of. tied: those of
        tied embeddings, which the first and the last stage have.
        """
        if self.ranks.tensor_size > 1:
            group = self.ranks.tensor_group
            yield from _sum(group, sum(partial), FP32_BYTES, is_forward=False)
        for elements in tied:
            line = self.ranks.pipeline
            group = self._of_pipeline(line[0], line[-1])
            yield from _sum(group, elements, FP32_BYTES, is_forward=False)

    def _tensor(self, stage: Part, group: RankGroup) -> Iterator[Message]:
        """Yield the moves of the tensor axis: 2 into and 2 out of the layers of a block."""
        yield from self._entries_and_exits(stage, group)
        if stage.is_first:
            yield from _sum(group, self.elements, self.width)
            if self.splits_rows and self.model.tokens.weight.requires_grad:
                row = self.elements * self.residual_width // group.size
                yield group.message(GATHER, row, is_forward=False)
        if stage.is_last:
            yield group.message(REDUCE, self.tokens * FP32_BYTES)
            yield from _sum(group, 2 * self.tokens, FP32_BYTES)
        yield from self._shared_groups(stage, group)
        squares = _part_bytes(group, self.tokens, FP32_BYTES)
        yield from in_layers(group, SUM, squares, *self._norms_of_heads(stage))

    def _entries_and_exits(self, stage: Part, group: RankGroup) -> Iterator[Message]:
        """Yield the moves where activations enter layers that are split, and where they leave."""
        back, again_out = self._moves_back(stage), self._recomputed_exits(stage)
        entries, num_exits = self._entries_of(stage.layers), self._exits_of(stage.layers)
        again = self._entries_of(chain(*self.checkpoints(stage)))
        for width, num_entries in entries.items():
            elements = self.tokens * width
            if self.splits_rows:
                row, num_again = elements * self.width // group.size, again[width]
                yield from in_layers(group, (EXCHANGE,), row, 0, back.entries[width])
                yield from in_layers(group, (GATHER,), row, num_entries, num_again)
            else:
                part = _part_bytes(group, elements, self.width)
                yield from in_layers(group, SUM, part, 0, back.entries[width])
        if not self.splits_rows:
            part = _part_bytes(group, self.elements, self.width)
            yield from in_layers(group, SUM, part, num_exits, again_out)
            if stage.is_last:
                yield from _sum(group, self.elements, self.width, is_forward=False)
            return
        row = self.elements * self.width // group.size
        yield from in_layers(group, (EXCHANGE,), row, num_exits, again_out)
        yield from in_layers(group, (GATHER,), row, 0, back.exits)
        if stage.is_last:  # into the output layer
            for kind, is_forward in ((GATHER, True), (EXCHANGE, False)):
                yield group.message(kind, row, is_forward=is_forward)

    def _widths_into_attention(self) -> tuple[int, ...]:
        """Return how many channels enter the layers of attention that are split."""
        config = self.config
        if not config.multi_latent_attention:
            return (self.hidden,)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return (config.q_lora_rank or self.hidden, latent)

    def _shared_groups(self, stage: Part, group: RankGroup) -> Iterator[Message]:
        """Yield the moves of queries, keys and values where ranks share a head of keys."""
        config = self.config
        if config.kv_heads >= group.size or config.multi_latent_attention:
            return
        columns = (config.num_attention_heads + 2 * config.kv_heads) * config.head_dim // group.size
        part, back = self.tokens * columns * self.width, self._moves_back(stage).inside
        again = self._recomputed(stage)
        yield from in_layers(group, (GATHER,), part, len(stage.layers), again)
        yield from in_layers(group, (EXCHANGE,), part, 0, back)

    def _norms_of_heads(self, stage: Part) -> tuple[int, int]:
        """Return how many normalizations of all heads sum squares, or their gradients.

        The first number is that of a forward pass, the second that of a backward pass.
        """
        if not (self.config.qk_layernorm and self.config.qk_layernorm_across_heads):
            return 0, 0
        again = self._moves_back(stage).inside + self._recomputed(stage)
        return 2 * len(stage.layers), 2 * again

    def _context(self, stage: Part, group: RankGroup) -> Iterator[Message]:
        """Yield the moves of the context axis, of queries, keys, values and the result."""
        config, layers = self.config, len(stage.layers)
        is_selective = self.execution.recomputes_attention
        heads, kv_heads = (
            max(count // self.ranks.tensor_size, 1)
            for count in (config.num_attention_heads, config.kv_heads)
        )
        back, again = self._moves_back(stage).inside, self._recomputed(stage)
        key_bytes, value_bytes = (
            self.tokens * channels * self.width for channels in (config.head_dim, config.value_dim)
        )
        if self.model.part.gathers_keys:
            both = kv_heads * (key_bytes + value_bytes)
            again = layers if is_selective else again
            yield from in_layers(group, (GATHER,), both, layers, again)
            yield from in_layers(group, (EXCHANGE,), both, 0, back)
            return
        kv_heads *= group.size // gcd(group.size, kv_heads)
        times = layers, back + again
        up_to_attention = layers, back + again + (layers if is_selective else 0)
        for num_bytes in (heads * key_bytes, kv_heads * key_bytes, kv_heads * value_bytes):
            part = num_bytes // group.size
            yield from in_layers(group, (EXCHANGE,), part, *up_to_attention)
        part = heads * value_bytes // group.size
        yield from in_layers(group, (EXCHANGE,), part, *times)

    def _pipeline(self, stage: Part) -> Iterator[Message]:
        """Yield the activations sent onward, and their gradients sent back."""
        rows = self.ranks.tensor_size if self.splits_rows else 1
        num_bytes = self.elements // rows * self.residual_width
        line, place = self.ranks.pipeline, self.ranks.pipeline_rank
        for is_end, step in ((stage.is_last, 1), (stage.is_first, -1)):
            if not is_end:
                group = self._of_pipeline(line[place], line[(place + step) % len(line)])
                yield group.message(EXCHANGE, num_bytes, is_forward=step == 1)

    def _of_pipeline(self, *ranks: int) -> RankGroup:
        """Return two ranks of the pipeline, this one perhaps among them, as a planned group."""
        members = tuple(sorted(ranks))
        position = self.ranks.rank if self.ranks.rank in members else members[0]
        return RankGroup(
            members=members, position=position, nodes=self.ranks.nodes, purpose="pipeline"
        )

    def _moves_back(self, stage: Part) -> "MovesBack":
        """Return which gradients are moved; none is needed where all that is before is frozen."""
        entries: Counter[int] = Counter()
        inside = exits = 0
        is_needed = not stage.is_first or self.model.tokens.weight.requires_grad
        for layer in stage.layers:
            attention, mlp = self.model.blocks[layer].attention, self.model.blocks[layer].mlp
            for width, before in zip(
                self._widths_into_attention(), _before_entries(attention), strict=True
            ):
                entries[width] += is_needed or any(map(_is_trained, before))
            is_needed = is_needed or any(
                _is_trained(child)
                for child in attention.children()
                if child is not attention.output
            )
            inside += is_needed
            is_needed = is_needed or _is_trained(attention)
            exits += is_needed
            entries[self.hidden] += is_needed and mlp.is_split
            is_needed = is_needed or _is_trained(mlp)
            exits += is_needed and mlp.is_split
        return MovesBack(entries=entries, inside=inside, exits=exits)

    def layers_with_gradients(self, stage: Part) -> list[int]:
        """Return the layers of a stage behind what is trained."""
        is_needed, layers = not stage.is_first or self.model.tokens.weight.requires_grad, []
        for layer in stage.layers:
            is_needed = is_needed or _is_trained(self.model.blocks[layer])
            layers += [layer] * is_needed
        return layers

    def _recomputed(self, stage: Part) -> int:
        """Return how many of a stage's layers are computed twice."""
        return sum(map(len, self.checkpoints(stage)))

    def checkpoints(self, stage: Part) -> list[tuple[int, ...]]:
        """Return the layers that are computed twice, grouped as they are computed again at once."""
        trained = (layer for layer in stage.layers if _is_trained(self.model.blocks[layer]))
        first = next(trained, stage.layers.stop) if stage.is_first else stage.layers.start
        groups = self.execution.checkpoints(stage.layers)
        return [group for group in groups if group[-1] >= first]

    def _recomputed_exits(self, stage: Part) -> int:
        """Return how many moves out of layers are made again in backward.

        PyTorch ends a recomputation when it has all that backward needs. That is before the last
        sum, unless dropout or a normalization follows it.
        """
        checkpoints, config = self.checkpoints(stage), self.config
        is_last = config.hidden_dropout == 0 and config.norm_placement == "pre"
        last_mlps = [self.model.blocks[group[-1]].mlp for group in checkpoints]
        not_again = sum(each.is_split for each in last_mlps) if is_last else 0
        return self._exits_of(chain(*checkpoints)) - not_again

    def _exits_of(self, layers: Iterable[int]) -> int:
        """Return how often activations leave what is split: attention, and MLPs that are."""
        return sum(1 + self.model.blocks[layer].mlp.is_split for layer in layers)

    def _entries_of(self, layers: Iterable[int]) -> Counter[int]:
        """Return how often activations enter what is split, by their channels."""
        entries: Counter[int] = Counter()
        for layer in layers:
            entries.update(self._widths_into_attention())
            entries[self.hidden] += self.model.blocks[layer].mlp.is_split
        return entries


def _before_entries(attention: CoreAttention) -> list[list[nn.Module]]:
    """Return the layers of attention before each of its entries into layers that are split."""
    if not isinstance(attention, LatentAttention):
        return [[]]
    pairs = (attention.q_down, attention.q_down_norm), (attention.kv_down, attention.kv_down_norm)
    return [[layer for layer in pair if layer is not None] for pair in pairs]


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _num_local(parameter: nn.Parameter) -> int:
    return local_part(parameter).numel()


def in_layers(
    group: RankGroup, kinds: Iterable[str], num_bytes: int, forward: int, backward: int
) -> Iterator[Message]:
    """Yield messages of layers, `forward` times and `backward` times in these passes."""
    for kind in kinds:
        for times, is_forward in ((forward, True), (backward, False)):
            yield group.message(kind, num_bytes, times=times, is_forward=is_forward, in_layers=True)


def _sum(
    group: RankGroup, elements: int, width: int, *, is_forward: bool = True
) -> Iterator[Message]:
    """Yield a sum on all ranks."""
    part = _part_bytes(group, elements, width)
    for kind in SUM:
        yield group.message(kind, part, is_forward=is_forward)


def _part_bytes(group: RankGroup, elements: int, width: int) -> int:
    """Return the bytes of the part that a rank sums."""
    return -(-elements // group.size) * width
