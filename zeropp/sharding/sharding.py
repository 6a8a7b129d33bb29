"""`Sharding`: the result of `zeropp.shard`, and what a training step must do with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeropp import fsdp_adapter as fsdp
from zeropp.ranks.groups import close_groups
from zeropp.sharding.forecast import Rows, describe, rank_bytes
from zeropp.sharding.grid import Grid, num_replicas
from zeropp.sharding.plan import Plan
from zeropp.sharding.root import Root
from zeropp.sharding.whole_weights import WholeWeights
from zeropp.wire.gradients import Gradients
from zeropp.wire.quantized_shard import require_frozen
from zeropp.wire.traffic import JoinedTraffic, Sent


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """A sharded model: what was planned, its roots with their units, and its ledger.

    `model` holds the parameters of all roots; there are no roots if nothing had to be sharded.
    Another stage of the pipeline holds the same parameters as the modules in `at_both_ends`.
    """

    model: nn.Module
    plan: Plan
    grid: Grid = field(repr=False)
    roots: tuple[Root, ...] = field(default=(), repr=False)
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    gradients: Gradients = field(default_factory=Gradients, repr=False)
    at_both_ends: tuple[nn.Module, ...] = field(default=(), repr=False)

    @classmethod
    def join(
        cls,
        model: nn.Module,
        parts: Sequence["Sharding"],
        *,
        at_both_ends: Sequence[nn.Module] = (),
    ) -> "Sharding":
        """Return several shardings of one mesh and one configuration as the sharding of `model`.

        Each part is a stage of a pipeline with its own passes. `model` is not one of their models;
        it holds all their parameters.
        """
        first = parts[0]
        units = tuple(unit for part in parts for unit in part.plan.units)
        roots = tuple(root for part in parts for root in part.roots)
        plan = replace(first.plan, units=units)
        return replace(
            first,
            model=model,
            plan=plan,
            roots=roots,
            gradients=Gradients(),
            at_both_ends=tuple(at_both_ends),
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks the data axis has."""
        return 1 if self.group is None else self.group.size()

    @property
    def stage(self) -> int:
        return self.plan.stage

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.plan.compute_dtype

    @property
    def units(self) -> tuple[fsdp.FSDPModule, ...]:
        """The blocks of each root in forward order, then the root."""
        return tuple(unit for root in self.roots for unit in root.units)

    @property
    def traffic(self) -> JoinedTraffic:
        """The ledger: bytes that this rank has sent."""
        return JoinedTraffic(root.traffic for root in self.roots)

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank holds a different slice of the averaged gradients."""
        return self.stage >= 1 and self.num_ranks > 1

    def refresh(self) -> None:
        """Use the parameters that the modules hold now, which have got their memory."""
        for root in self.roots:
            root.scalars.move_to_device()
            fsdp.refresh_parameters(root.units)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Enclose one micro-batch's forward and backward; `last` marks the last one of a step."""
        self.begin_micro_step(last=last)
        yield

    def begin_micro_step(self, *, last: bool, accumulate: bool = False) -> None:
        """Set what the next backward does with weights and gradients; call before its forward.

        With `accumulate`, it only adds up this rank's gradients, at every stage, until
        `reduce_accumulated`.
        """
        if self.plan.has_codes:
            require_frozen(self.model)
        for root in self.roots:
            root.begin_micro_step(last=last, accumulate=accumulate)

    def reduce_accumulated(self) -> None:
        """Average the gradients that backward passes have accumulated; all ranks call it."""
        for root in self.roots:
            root.reduce_accumulated()

    def discard_gradients(self, set_to_none: bool = True) -> None:
        """Clear all gradients of a step that is to be repeated.

        This includes the whole gradients that FSDP2 accumulates until the last micro-batch, which
        are not in any `.grad`, so that an optimizer's `zero_grad` does not clear them.
        """
        self.model.zero_grad(set_to_none)
        for root in self.roots:
            root.discard_gradients(set_to_none)

    def require_complete_gradients(self) -> None:
        """Raise InputError if a backward pass failed and left gradients of a part of the model."""
        for root in self.roots:
            root.require_complete()

    def require_same_order(self) -> None:
        """Raise InputError if the ranks reduced different units in the last backward pass.

        Without this call, GPUs report it in the next pass. All ranks call it, and the host waits
        until the backward pass has ended.
        """
        for root in self.roots:
            if root.use is not None:
                root.use.require_same_order()

    def release(self, *, held: bool = False) -> None:
        """Free gathered weights; those that modules hold whole between passes, only if `held`."""
        for root in self.roots:
            if held or not root.whole:
                root.release()

    def holds_whole(self, parameter: torch.Tensor) -> bool:
        """Whether a module's parameter is whole between passes, and is freed in one."""
        is_plain = not isinstance(parameter, DTensor | fsdp.WholeParameter)
        return is_plain and parameter.ndim > 0 and bool(self._whole)

    def keep_whole(self) -> None:
        """Let modules hold whole, plain parameters between passes from now on; all ranks call it.

        What programs write to them is found before the next pass, or when `as_shards` is entered.
        """
        for root in self.roots:
            root.keep_whole()
        self.gather()

    def gather(self) -> None:
        """Gather whole parameters that were freed, if they are kept; all ranks call it."""
        for whole in self._whole:
            whole.gather()

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Let modules hold shards inside, which have taken what was written to whole parameters.

        Whole parameters are gathered again afterwards, unless there was an exception.
        """
        for whole in self._whole:
            whole.hide(takes=True)
        try:
            yield
        finally:
            for whole in self._whole:
                whole.show()
        self.gather()

    @property
    def _whole(self) -> list[WholeWeights]:
        return [root.whole for root in self.roots if root.whole]

    def has_called_methods(self) -> bool:
        """Whether methods, not forward passes, made what may get gradients since the last call."""
        has_called = any(root.has_called for root in self.roots)
        for root in self.roots:
            root.has_called = False
        return has_called

    def take(self, shard: torch.nn.Parameter) -> None:
        """Let one shard take what was written to its whole parameter."""
        for whole in self._whole:
            whole.take(shard)

    def weights_changed(self) -> None:
        """Drop gathered weights, hpZ's copies included, because the shards have changed.

        Steps of torch.optim optimizers, `load_state_dict` and writes in place that raise a tensor's
        version do this by themselves. Call it on every rank after writing into the shards by other
        means.
        """
        for root in self.roots:
            root.kept.drop()

    def close_groups(self) -> None:
        """Close the process groups that this model shares with all others on its mesh.

        All ranks of the mesh call it. None of these models can be used afterwards; models that are
        sharded later get new groups. `torch.distributed.destroy_process_group()` closes them too.
        """
        if self.group is not None:
            close_groups(dist.get_process_group_ranks(self.group))

    @property
    def parts_gradients(self) -> bool:
        """Whether data ranks hold different gradients: slices, or of other parts of a model."""
        return self.shards_gradients or len(self.plan.axes) > 1

    def num_copies(self, parameter: torch.Tensor) -> int:
        """Return how many of the ranks whose parts are summed hold the same part of a parameter."""
        if not self.parts_gradients:
            return self.num_copies_beside(parameter)
        return self.num_holders(parameter)

    def num_holders(self, parameter: torch.Tensor) -> int:
        """Return how many of all ranks hold the same part of a parameter."""
        if self.grid.has_own_mesh(parameter):
            return num_replicas(parameter)
        is_on_all = not (self.shards_gradients and isinstance(parameter, DTensor))
        return self.num_copies_beside(parameter) * (self.num_ranks if is_on_all else 1)

    def num_copies_beside(self, parameter: torch.Tensor) -> int:
        """Return how many ranks beside the data axis hold the same part of a parameter."""
        return self.grid.num_copies(parameter) * self.num_stages(parameter)

    def num_stages(self, parameter: torch.Tensor) -> int:
        """Return how many stages of a pipeline hold a parameter, or the parameter of a master."""
        own = self.gradients.parameter_of(parameter)
        ends = (each for module in self.at_both_ends for each in module.parameters(recurse=False))
        return 2 if any(each is own for each in ends) else 1

    def expected_traffic(
        self, num_micro_batches: int = 1, *, typical: bool = False
    ) -> dict[tuple[str, str], int]:
        """Return the bytes this rank sends per step, by (purpose, hop); empty for one rank.

        Coded messages count as they are before, or with `typical` as in typical runs.
        """
        if self.num_ranks == 1:
            return {}
        return rank_bytes(self.plan, num_micro_batches, typical=typical)

    def plain_traffic(
        self, num_micro_batches: int = 1, *, worlds: int = 1, world: int = 0
    ) -> dict[tuple[str, str], int]:
        """Return `expected_traffic` of the same stage under plain FSDP2, to compare with.

        With independent replicas it is over the ranks of all `worlds`, of which this is one.
        """
        if worlds * self.num_ranks == 1:
            return {}
        return rank_bytes(self.plan.plain(worlds, world), num_micro_batches)

    def describe(self, num_micro_batches: int = 1, sent: Sent | None = None) -> Rows:
        """Return table rows (name, text): the collectives as they run, and the bytes a node sends.

        A text may have several lines. `sent` replaces the forecast of a node's bytes, which only
        covers weights and gradients.
        """
        return describe(self.plan, num_micro_batches, sent)
