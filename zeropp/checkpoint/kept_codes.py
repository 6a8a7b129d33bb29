"""The codes that nodes keep of the weights, where they move by steps: each rank saves its own row.

    rank3.codes.<unit>    uint8 (P,)   the codes that all nodes hold of rank 3's shard
    rank3.steps.<unit>    int64        whether they are out of date, and what the last message held

A run that goes on from them takes the steps that it would have taken. They are of no use to another
number of ranks, where shards differ.
"""

import logging
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zeropp import fsdp_adapter as fsdp
from zeropp.ranks.coordination import rank, world_size
from zeropp.wire.secondary_copies import SecondaryCopies, copies_of_model

CODES, STEPS = "codes", "steps"
_NAME = re.compile(rf"rank(\d+)\.(?:{CODES}|{STEPS})\.")
log = logging.getLogger("zeropp")


def codes_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's rows and what belongs to them by name; empty without steps of codes."""
    tensors = {}
    for name, unit, copies in _units(model):
        if (own := copies.own_row(unit)) is not None:
            tensors[f"rank{rank()}.{CODES}.{name}"] = own.row
            tensors[f"rank{rank()}.{STEPS}.{name}"] = own.steps
    return tensors


def without_codes(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a checkpoint holds besides codes."""
    return {name: tensor for name, tensor in saved.items() if not _NAME.match(name)}


def codes_to_load(model: nn.Module, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return memory for the codes that a checkpoint holds for this rank's units, by name.

    It is empty, which rank 0 says, if another number of ranks has saved them.
    """
    numbers = {int(match[1]) for name in saved if (match := _NAME.match(name))}
    names = [f"rank{rank()}.{kind}.{name}" for name, *_ in _units(model) for kind in (CODES, STEPS)]
    if numbers and names and numbers != set(range(world_size())):
        if rank() == 0:
            log.info(
                "the checkpoint's codes of weights are of %d ranks, and there are %d: whole codes "
                "cross the nodes once again", max(numbers) + 1, world_size(),
            )  # fmt: skip
        return {}
    return {
        name: torch.empty(saved[name].shape, dtype=saved[name].dtype)
        for name in names
        if name in saved
    }


def restore_codes(model: nn.Module, loaded: Mapping[str, Tensor]) -> None:
    """Let the next gathers go on from these codes."""
    for name, unit, copies in _units(model):
        row = loaded.get(f"rank{rank()}.{CODES}.{name}")
        if row is not None:
            copies.restore(unit, row, loaded[f"rank{rank()}.{STEPS}.{name}"])


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module, SecondaryCopies]]:
    """Yield the name of each unit that keeps codes, the unit, and what keeps them."""
    for prefix, root in model.named_modules():
        copies = copies_of_model(root)
        if copies is None or copies.steps is None:
            continue
        for name, module in root.named_modules(prefix=prefix):
            if isinstance(module, fsdp.FSDPModule):
                yield name, module, copies
