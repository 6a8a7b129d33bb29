"""Saves the codes of weights that nodes keep and update by steps: each rank saves its own row.

    rank3.codes.<unit>    uint8 (P,)   the codes that all nodes hold of rank 3's shard
    rank3.kept.<unit>     int64        `_Record`: what these codes are of, and what follows them

A run that resumes from them takes the same steps as one that was not interrupted. They cannot be
used if shards or the format of numbers differ: then the whole codes of all units cross the nodes
once more, on all ranks.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp import fsdp_adapter as fsdp
from zeropp.ranks.coordination import current_group, gather_objects, rank, world_size
from zeropp.wire.collectives import WeightGather, weight_layout

CODES, KEPT = "codes", "kept"
UNRECORDED = "steps"  # what checkpoints have beside codes that do not say what these are of
_NAME = re.compile(rf"rank(\d+)\.({CODES}|{KEPT}|{UNRECORDED})\.(.*)", re.DOTALL)
log = logging.getLogger("zeropp")


class _Record(NamedTuple):
    """Identifies the shards that a rank's codes of a unit represent, and their state."""

    shards: int  # a digest of the shards of its weights, and of how the row holds them
    members: int  # of earlier versions, whose ranks agreed on how far codes may move; else 0
    is_outdated: bool  # whether weights have been stepped since
    levels: list[int]  # of earlier versions, likewise; else empty
    content: int = 0  # a digest of the codes and of all of the above

    @classmethod
    def read(cls, numbers: Tensor) -> "_Record":
        content, shards, members, is_outdated, *levels = numbers.tolist()
        return cls(shards, members, bool(is_outdated), levels, content)

    def of(self, row: Tensor) -> "_Record":
        """Return this record with the digest of `row` (P,), the codes that belong to it."""
        codes = hashlib.blake2b(row.cpu().numpy(), digest_size=8).hexdigest()
        return self._replace(content=_digest((codes, *self[:4])))

    def tensor(self) -> Tensor:
        return torch.tensor([self.content, *self[:3], *self.levels], dtype=torch.int64)


class _Unit(NamedTuple):
    """A unit that keeps codes, and what gathers them."""

    module: nn.Module
    gather: WeightGather

    def record(self, *, is_outdated: bool) -> _Record:
        """Return what this rank would save of the unit now."""
        dtype, _ = fsdp.dtypes_of(self.module)
        layout = weight_layout(fsdp.own_specs(self.module), self.gather.route, dtype)
        shards = [
            (tuple(each.shape), repr(each.placements), _numbers(each.device_mesh.mesh.flatten()))
            for each in fsdp.shards(self.module)
        ]
        return _Record(
            shards=_digest((layout.table, shards)),
            members=0,
            is_outdated=is_outdated,
            levels=[],
        )


@dataclass
class SavedCodes:
    """A checkpoint's codes of this rank's units: fill `tensors`, then call `restore`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    units: dict[str, _Unit] = field(default_factory=dict)  # whose codes these are
    are_there: bool = False  # on any rank
    obstacle: str | None = None  # why this rank cannot use them

    def restore(self) -> None:
        """Let the next gathers go on from these codes; all ranks call it.

        Without a copy on all of them no rank uses any, which rank 0 says.
        """
        if not self.are_there:
            return
        kept = {name: self.tensors[f"rank{rank()}.{KEPT}.{name}"] for name in self.units}
        saved = {name: _Record.read(numbers) for name, numbers in kept.items()}
        rows = {name: self.tensors[f"rank{rank()}.{CODES}.{name}"] for name in self.units}
        own = {name: unit.record(is_outdated=False) for name, unit in self.units.items()}
        if any(saved[name] != saved[name].of(rows[name]) for name in saved):
            self.obstacle = "are damaged"
        elif any(saved[name].shards != own[name].shards for name in saved):
            self.obstacle = "belong to other shards or another format than this run's"
        if reasons := [each for each in gather_objects(self.obstacle) if each is not None]:
            if rank() == 0:
                log.info(
                    "cannot use the checkpoint's weight codes, which %s: whole codes cross the "
                    "nodes once more",
                    reasons[0],
                )
            return
        for name, (module, gather) in self.units.items():
            gather.kept.restore(module, rows[name], is_outdated=saved[name].is_outdated)
            gather.kept.note(module)


def codes_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's rows of codes by name; empty if no codes are kept.

    All ranks call it: codes of weights that were written since, on any of them, are dropped first.
    """
    tensors, units = {}, _units(model)
    for kept in dict.fromkeys(unit.gather.kept for unit in units.values()):
        kept.drop_written()
    for name, unit in units.items():
        own = unit.gather.kept.own_row(unit.module, unit.gather.outer.index)
        if own is not None:
            tensors[f"rank{rank()}.{CODES}.{name}"] = own.row
            record = unit.record(is_outdated=own.is_outdated).of(own.row)
            tensors[f"rank{rank()}.{KEPT}.{name}"] = record.tensor()
    return tensors


def without_codes(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint holds besides codes."""
    return {name: tensor for name, tensor in saved.items() if not _NAME.match(name)}


def codes_to_load(
    model: nn.Module, saved: Mapping[str, Tensor], *, obstacle: str | None = None
) -> SavedCodes:
    """Return memory for the codes that a checkpoint holds for this rank's units.

    `saved` has the names, shapes and dtypes of its tensors. `obstacle` says why this rank cannot
    use any, if so.
    """
    units = _units(model)
    matches = [match for name in saved if (match := _NAME.fullmatch(name))]
    if not units or not matches:
        return SavedCodes()
    numbers = {int(match[1]) for match in matches}
    own = {match[3] for match in matches if int(match[1]) == rank()}
    if numbers != set(range(world_size())):
        obstacle = f"are of {max(numbers) + 1} ranks, and there are {world_size()}"
    elif any(match[2] == UNRECORDED for match in matches):
        obstacle = "are of an earlier version, which did not save what they are of"
    elif not own <= units.keys():
        obstacle = "belong to other units than this run's"
    if obstacle is not None:
        return SavedCodes(are_there=True, obstacle=obstacle)
    tensors = {
        name: torch.empty(saved[name].shape, dtype=saved[name].dtype)
        for name in (f"rank{rank()}.{kind}.{unit}" for kind in (CODES, KEPT) for unit in own)
    }
    return SavedCodes(tensors, {name: units[name] for name in own}, are_there=True)


def _units(model: nn.Module) -> dict[str, _Unit]:
    """Return the units that keep codes, by names that are the rank's own.

    A model may consist of several that are called on their own, such as the stages of a pipeline,
    which are then its attribute `roots`.
    """
    units = {}
    for prefix, root in _roots(model):
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, fsdp.FSDPModule) and fsdp.own_specs(module):
                gather = fsdp.collectives_of(module).all_gather
                if isinstance(gather, WeightGather) and gather.kept and gather.kept.updates:
                    units[name] = _Unit(module, gather)
    return units


def _roots(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "", model
    for index, root in enumerate(getattr(model, "roots", ())):
        yield f"root{index}", root


def _numbers(ranks: Tensor | list[int]) -> list[int]:
    """Return the numbers of global ranks among those that save and load together."""
    group = current_group() or dist.group.WORLD
    return [dist.get_group_rank(group, int(each)) for each in ranks]


def _digest(value: object) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
