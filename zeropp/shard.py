"""Shard any model by ZeRO stage, in place, in one call.

    sharding = zeropp.shard(model, mesh, config)
    for index, batch in enumerate(micro_batches):
        with sharding.micro_step(last=index == len(micro_batches) - 1):
            (loss(model, batch) / len(micro_batches)).backward()

| stage | parameters between uses         | gradients                                  | optimizer |
|-------|---------------------------------|--------------------------------------------|-----------|
| 0     | whole on every rank             | whole; all-reduced once per step           | whole     |
| 1     | sharded; gathered once per step | whole; reduce-scattered once per step      | sharded   |
| 2     | sharded; gathered once per step | reduce-scattered after each micro-batch    | sharded   |
| 3     | sharded; gathered for each use  | reduce-scattered after each micro-batch    | sharded   |

Source: ZeRO (Rajbhandari et al. 2020), section 5; expressed on FSDP2 as in docs/adr/0001.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeropp import fsdp_adapter as fsdp
from zeropp.collectives import AllToAllReduceScatter
from zeropp.config import ZeroConfig
from zeropp.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What `shard` made of a model: its units, and how a step must treat them."""

    model: nn.Module
    stage: int
    num_ranks: int
    compute_dtype: torch.dtype
    gradient_wire_dtype: torch.dtype
    units: tuple[fsdp.FSDPModule, ...] = ()  # the blocks in forward order, then the root
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank holds a different slice of the averaged gradients."""
        return self.stage >= 1 and self.num_ranks > 1

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch's forward and backward; `last` is the step's last one."""
        for unit in self.units:
            unit.set_requires_gradient_sync(last or self.stage >= 2, recurse=False)
            unit.set_reshard_after_backward(last or self.stage == 3, recurse=False)
        yield

    def release(self) -> None:
        """Free weights that forward-only passes left gathered (evaluation, generation)."""
        for unit in self.units:
            unit.reshard()

    def describe(self, num_micro_batches: int = 1) -> tuple[tuple[str, str], ...]:
        """Rows (purpose, what really runs): collective, width, ranks, bytes each rank sends."""
        if self.num_ranks == 1:
            return (("collectives", "none: one rank"),)
        share = (self.num_ranks - 1) / self.num_ranks
        everything = padded_elements(self.model, self.num_ranks)
        blocks = sum(padded_elements(block, self.num_ranks) for block in self.units[:-1])
        if self.stage == 0:
            sent = 2 * share * everything * torch.float32.itemsize
            return (("gradients", self._row("all-reduce", torch.float32, sent)),)
        gathered = everything if self.stage < 3 else num_micro_batches * (everything + blocks)
        reduced = everything * (1 if self.stage == 1 else num_micro_batches)
        gather = share * gathered * self.compute_dtype.itemsize
        reduce = share * reduced * self.gradient_wire_dtype.itemsize
        return (
            ("weights", self._row("all-gather", self.compute_dtype, gather)),
            ("gradients", self._row("all-to-all, fp32 sum", self.gradient_wire_dtype, reduce)),
        )

    def _row(self, collective: str, dtype: torch.dtype, num_bytes: float) -> str:
        return (
            f"{collective}, {8 * dtype.itemsize} bit, {self.num_ranks} ranks, "
            f"{num_bytes / 2**20:.2f} MiB sent per rank and step"
        )


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None,
    config: ZeroConfig,
    *,
    units: Iterable[nn.Module] | None = None,
    cast_forward_inputs: bool = True,
) -> Sharding:
    """Shard `model` in place over the one-axis `mesh` of data-parallel ranks.

    `units` are the submodules gathered one at a time, in forward order; by default the entries
    of the model's outermost `nn.ModuleList`s. Parameters stay fp32 (or as they are); compute
    runs in `config.compute_dtype`. Build the optimizer afterwards: it must hold the shards.
    With one rank in fp32 there is nothing to shard and the model is left as it is.

    Raises InputError for a mesh of more than one axis, or settings that are not available.
    """
    config.require_available()
    num_ranks = 1 if mesh is None else mesh.size()
    facts = {
        "model": model, "stage": config.zero_optimization.stage, "num_ranks": num_ranks,
        "compute_dtype": config.compute_dtype, "gradient_wire_dtype": config.wire_dtype,
    }
    if num_ranks == 1 and config.compute_dtype == torch.float32:
        return Sharding(**facts)
    if mesh is None or mesh.ndim != 1:
        raise InputError(f"zeropp.shard needs a device mesh of one axis (the data axis): {mesh}")
    blocks = tuple(outermost_blocks(model) if units is None else units)
    _shard_units(model, blocks, mesh, config, cast_forward_inputs)
    if num_ranks > 1 and facts["stage"] >= 1:
        fsdp.use_reduce_scatter((*blocks, model), AllToAllReduceScatter(config.wire_dtype))
    if num_ranks > 1 and blocks and mesh.device_type == "cpu":
        fsdp.gather_ahead(model, blocks)
    return Sharding(**facts, units=(*blocks, model), group=mesh.get_group())


def outermost_blocks(module: nn.Module) -> Sequence[nn.Module]:
    """The entries of the outermost `nn.ModuleList`s that hold parameters, in definition order.

    One that is entered several times, as where layers share their weights, counts once.
    """
    found: dict[nn.Module, None] = {}
    for child in module.children():
        inside = child if isinstance(child, nn.ModuleList) else outermost_blocks(child)
        found |= dict.fromkeys(one for one in inside if any(True for _ in one.parameters()))
    return list(found)


def padded_elements(module: nn.Module, num_ranks: int) -> int:
    """Elements of all parameters, dim 0 of each rounded up to a multiple of `num_ranks`."""
    total = 0
    for parameter in module.parameters():
        rows = parameter.shape[0] if parameter.ndim else 1
        total += -(-rows // num_ranks) * num_ranks * (parameter.numel() // max(rows, 1))
    return total


def _shard_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    config: ZeroConfig,
    cast_forward_inputs: bool,
) -> None:
    stage, ranks = config.zero_optimization.stage, mesh.size()
    if stage == 0 and ranks > 1:  # replicas: shards of one rank, averaged over all
        mesh = DeviceMesh(
            mesh.device_type, mesh.mesh.view(-1, 1), mesh_dim_names=("replica", "shard")
        )
    # Unsharded gradients accumulate in reduce_dtype; the wire's width is the collective's affair.
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=config.compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=cast_forward_inputs,
    )
    regather = stage == 3 and ranks > 1
    for block in blocks:
        fsdp.shard_unit(block, mesh, policy, reshard_after_forward=regather)
    # The root's own parameters are used first in forward and last in backward or, as with a tied
    # head, at both ends: they stay gathered from its forward to its backward.
    fsdp.shard_unit(model, mesh, policy, reshard_after_forward=False)

