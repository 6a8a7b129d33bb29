"""The facts of a run that its memory follows from: what is gathered and reduced at once, and how.

The model is built on the meta device; its parameters are cut as FSDP2 and ZeRO-Offload cut them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megatron_zpp.config import Config
from megatron_zpp.model.gpt import GPT
from megatron_zpp.schedule import Schedules
from zeropp.collectives import gradient_layouts, weight_layout
from zeropp.forecast import Forecast
from zeropp.fsdp_adapter import Piece
from zeropp.offload import HOST, places
from zeropp.route import Nodes, gradient_route, weight_route
from zeropp.stages import outermost_blocks

WIDE = 4  # bytes in fp32 of a weight or a gradient
DEVICE = torch.device("meta")  # which is not the host


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced at once: bytes, all but `elements`.

    elements: of one rank's padded shard. whole: gathered, in the compute format. arriving: packed
    rows under way to it. copy: hpZ's. sending: gradients to send and to receive, by hop.
    """

    elements: int
    whole: int
    wide: int  # gradients of the whole unit in fp32
    arriving: int
    copy: int
    sending: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The facts of a run that its memory follows from."""

    config: Config
    model: GPT  # on the meta device
    forecast: Forecast
    is_cpu: bool

    @property
    def num_ranks(self) -> int:
        return self.forecast.weights.nodes.num_ranks

    @property
    def stage(self) -> int:
        return self.forecast.stage

    @property
    def shards(self) -> int:
        """Into how many parts a unit is cut."""
        return 1 if self.stage == 0 else self.num_ranks

    @property
    def is_wrapped(self) -> bool:
        """Whether there is an engine; one rank in fp32 has none, but for weights on the host."""
        is_plain = self.num_ranks == 1 and self.compute.itemsize == WIDE
        return not is_plain or self.config.zero.offloads_weights

    @property
    def regathers(self) -> bool:
        """Whether blocks are gathered for each use and freed after it."""
        return self.stage == 3 and (self.num_ranks > 1 or self.config.zero.offloads_weights)

    @property
    def compute(self) -> torch.dtype:
        return self.forecast.compute_dtype

    @property
    def offloads(self) -> bool:
        return self.config.zero.offloads_optimizer

    @property
    def is_delayed(self) -> bool:
        """Whether an update may run beside the next step."""
        return self.config.zero.zeropp.delayed_param_update

    @cached_property
    def on_host(self) -> tuple[int, ...]:
        """Elements of this rank's padded shards whose masters are on the host."""
        if not self.offloads:
            return ()
        parameters = list(self.model.parameters())
        ratio = self.config.zero.zero_optimization.offload_optimizer.ratio
        where = places(parameters, ratio, DEVICE)
        pairs = zip(parameters, where, strict=True)
        return tuple(_piece(one, self.shards).elements for one, place in pairs if place == HOST)

    @property
    def group(self) -> int:
        """Blocks that are recomputed together; 0 where none is."""
        recompute = self.config.recompute
        if recompute.recompute_granularity != "full":
            return 0
        return 1 if recompute.recompute_method == "block" else recompute.recompute_num_layers

    @property
    def recomputed(self) -> int:
        """How many of the first blocks are recomputed."""
        recompute, blocks = self.config.recompute, len(self.units) - 1
        return recompute.recompute_num_layers if recompute.recompute_method == "block" else blocks

    @property
    def micro_batches(self) -> int:
        batch = Schedules.of(self.config).batch_size.final
        return batch // (self.config.batch.micro_batch_size * self.num_ranks)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The blocks, then the root."""
        return tuple(self._unit(pieces) for pieces in self.forecast.units)

    def _unit(self, pieces: tuple[Piece, ...]) -> Unit:
        elements = sum(one.elements for one in pieces)
        whole = self.shards * elements * self.compute.itemsize
        weights, means = self.forecast.weights, self.forecast.gradients
        flat = weights.is_flat
        packed = weight_layout(pieces, weights, self.compute).packed_bytes
        inner, outer = gradient_layouts(pieces, means, self.forecast.wire_dtype)
        sending = []
        if self.shards > 1:
            hops = ((means.inner, self.num_ranks, inner), (means.outer, means.outer, outer))
            sending = [2 * rows * one.packed_bytes for size, rows, one in hops if size > 1]
        return Unit(
            elements=elements,
            whole=whole,
            wide=self.shards * elements * WIDE,
            arriving=packed * (0 if flat else self.num_ranks if weights.keeps else weights.outer),
            copy=weights.outer * packed if weights.keeps and self.stage else 0,
            sending=tuple(sending),
        )


def plan_of(config: Config, vocab_size: int, nodes: Nodes, *, is_cpu: bool) -> Plan:
    """The plan of a run on ranks of `nodes`, on CPUs or on GPUs.

    Raises InputError for an hpZ partition that does not divide the ranks.
    """
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    blocks = tuple(outermost_blocks(model))
    inside = {one for block in blocks for one in block.parameters()}
    owned = [tuple(block.parameters()) for block in blocks]
    owned.append(tuple(one for one in model.parameters() if one not in inside))
    shards = 1 if config.zero.stage == 0 else nodes.num_ranks
    forecast = Forecast(
        stage=config.zero.stage,
        units=tuple(tuple(_piece(one, shards) for one in unit) for unit in owned),
        weights=weight_route(config.zero, nodes),
        gradients=gradient_route(config.zero, nodes),
        compute_dtype=getattr(torch, config.zero.compute_format),
        wire_dtype=getattr(torch, config.zero.wire_format),
    )
    return Plan(config=config, model=model, forecast=forecast, is_cpu=is_cpu)


def _piece(parameter: nn.Parameter, shards: int) -> Piece:
    rows = -(-parameter.shape[0] // shards)  # FSDP2 cuts the first axis, the last part padded
    return Piece(
        elements=rows * parameter[0].numel(), ndim=parameter.ndim, trainable=parameter.requires_grad
    )
