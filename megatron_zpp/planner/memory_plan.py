"""The facts of a run that its memory follows from: what is gathered and reduced at once, and how.

The model is built on the meta device; its parameters are cut as FSDP2 and ZeRO-Offload cut them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megatron_zpp.model.gpt import GPT
from megatron_zpp.model.lora import add_lora
from megatron_zpp.settings.config import Config
from megatron_zpp.settings.schedule import Schedules
from zeropp.fsdp_adapter import Piece
from zeropp.optim.offload import HOST, master_devices
from zeropp.sharding.forecast import Forecast
from zeropp.sharding.shard import outermost_blocks
from zeropp.sharding.subunits import trained_subunits
from zeropp.wire.collectives import gradient_layouts, weight_layout
from zeropp.wire.frozen_weights import stored_layout
from zeropp.wire.route import Nodes, gradient_route, weight_route

WIDE = 4  # bytes in fp32 of a weight or a gradient
DEVICE = torch.device("meta")  # which is not the host


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and reduced at once: bytes, all but `trained`.

    trained: elements of one rank's padded shard that have gradients and moments; frozen: bytes of
    the shard that is never trained. whole: gathered, in the compute format, with the codes that it
    may come of. buffer: what arrives when it is gathered, before it is copied out; arriving: packed
    rows on their way there. copy: hpZ's. sending: gradients to send and to receive, by hop.
    """

    trained: int
    frozen: int
    whole: int
    buffer: int
    gradient: int  # of the whole unit in the compute format
    wide: int  # the same in fp32
    arriving: int
    copy: int
    sending: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The facts of a run that its memory follows from."""

    config: Config
    model: GPT  # on the meta device
    forecast: Forecast
    parts: tuple[int, ...]  # units of the forecast that make one here
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
        """Whether there is an engine; one rank in fp32 has one for weights on the host or codes."""
        is_plain = self.num_ranks == 1 and self.compute.itemsize == WIDE
        return not is_plain or self._needs_engine

    @property
    def regathers(self) -> bool:
        """Whether blocks are gathered for each use and freed after it."""
        return self.stage == 3 and (self.num_ranks > 1 or self._needs_engine)

    @property
    def _needs_engine(self) -> bool:
        return self.config.zero.offloads_weights or self.config.zero.stores_frozen

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
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        ratio = self.config.zero.zero_optimization.offload_optimizer.ratio
        where = master_devices(parameters, ratio, DEVICE)
        pairs = zip(parameters, where, strict=True)
        return tuple(
            _piece(one, self.shards, None).elements for one, place in pairs if place == HOST
        )

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

    @property
    def built(self) -> int:
        """Bytes on the device when its shards have been filled, with the largest shard that is
        numbers before it is codes; on a CPU, which is both places, with the largest weight too."""
        if self.config.zero.offloads_weights and not self.is_cpu:
            return 0
        pieces = [one for unit in self.forecast.units for one in unit]
        passing = max((piece.elements for piece in pieces if piece.packed_bytes), default=0)
        if self.is_cpu:
            passing += max(parameter.numel() for parameter in self.model.parameters())
        elif self.offloads:
            pieces = [piece for piece in pieces if not piece.trainable]
        return sum(piece.packed_bytes or WIDE * piece.elements for piece in pieces) + WIDE * passing

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The blocks, then the root, each with adapters of its own that are gathered apart."""
        found, waiting = [], iter(self.forecast.units)
        for parts in self.parts:
            pieces = [next(waiting) for _ in range(parts)]
            found.append(self._unit([one for part in pieces for one in part]))
        return tuple(found)

    def _unit(self, pieces: Sequence[Piece]) -> Unit:
        width, shards = self.compute.itemsize, self.shards
        trainable = [piece for piece in pieces if piece.trainable]
        trained = sum(one.elements for one in trainable)
        codes = sum(piece.packed_bytes for piece in pieces)
        frozen = (
            sum(piece.packed_bytes or WIDE * piece.elements for piece in pieces) - WIDE * trained
        )
        weights, means = self.forecast.weights, self.forecast.gradients
        row = sum(piece.packed_bytes or width * piece.elements for piece in pieces)
        packed = row if codes else weight_layout(pieces, weights, self.compute).packed_bytes
        inner, outer = gradient_layouts(trainable, means, self.forecast.wire_dtype)
        sending = []
        if shards > 1 and trained:
            hops = ((means.inner, self.num_ranks, inner), (means.outer, means.outer, outer))
            sending = [2 * rows * one.packed_bytes for size, rows, one in hops if size > 1]
        return Unit(
            trained=trained,
            frozen=frozen,
            whole=shards * (width * sum(piece.elements for piece in pieces) + codes),
            buffer=shards * row,
            gradient=shards * trained * width,
            wide=shards * trained * WIDE,
            arriving=packed
            * (0 if weights.is_flat else self.num_ranks if weights.keeps else weights.outer),
            copy=weights.outer * packed if weights.keeps and self.stage else 0,
            sending=tuple(sending),
        )


def plan_of(config: Config, vocab_size: int, nodes: Nodes, *, is_cpu: bool) -> Plan:
    """The plan of a run on ranks of `nodes`, on CPUs or on GPUs.

    Raises InputError for an hpZ partition that does not divide the ranks.
    """
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
        if config.lora.lora_rank:
            add_lora(model, config.lora)
    owned = _units(model, config.zero.stores_frozen)
    shards = 1 if config.zero.stage == 0 else nodes.num_ranks
    bits = config.zero.zeropp.nontrainable_weight_bits if config.zero.stores_frozen else None
    forecast = Forecast(
        stage=config.zero.stage,
        units=tuple(
            tuple(_piece(one, shards, bits) for one in unit) for parts in owned for unit in parts
        ),
        weights=weight_route(config.zero, nodes),
        gradients=gradient_route(config.zero, nodes),
        compute_dtype=getattr(torch, config.zero.compute_format),
        wire_dtype=getattr(torch, config.zero.wire_format),
    )
    parts = tuple(len(one) for one in owned)
    return Plan(config=config, model=model, forecast=forecast, parts=parts, is_cpu=is_cpu)


def _units(model: GPT, stores_frozen: bool) -> list[list[list[nn.Parameter]]]:
    """The parameters of each FSDP unit, by block, then the root's: as `zeropp.shard` makes them."""
    blocks = outermost_blocks(model)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    within = {module for block in blocks for module in block.modules()}
    found = []
    for module, others in (*((block, ()) for block in blocks), (model, within)):
        apart = trained_subunits(module, others) if stores_frozen else {}
        left = set().union(*apart.values())
        here = [
            parameter
            for parameter in module.parameters()
            if module is not model or parameter not in inside
        ]
        adapters = [one for one in here if one in left]
        own = [one for one in here if one not in left]
        units = [own, adapters] if module is not model else [adapters, own]
        found.append([unit for unit in units if unit])
    return found


def _piece(parameter: nn.Parameter, shards: int, bits: int | None) -> Piece:
    """What a rank has of a parameter; `bits`: of codes that frozen matrices are stored as."""
    elements = -(-parameter.shape[0] // shards) * parameter[0].numel()  # FSDP2 cuts the first axis
    is_stored = bits and parameter.ndim >= 2 and not parameter.requires_grad
    return Piece(
        elements=elements,
        ndim=parameter.ndim,
        trainable=parameter.requires_grad,
        packed_bytes=stored_layout(elements, bits).packed_bytes if is_stored else 0,
    )
