"""Tensors that are not shards and differ between ranks: each rank's has a name of its own.

    rank2.model.norm.running_mean     rank 2's
    model.norm.running_mean           rank 0's, for programs that read a whole model

Statistics of batches in a model's buffers are such tensors, and what an optimizer computes from its
shards alone. Tensors that are equal on all ranks are saved once.
"""

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from zeropp.errors import InputError, first_few
from zeropp.ranks.coordination import gather_objects, rank, world_size

# Prefixes of an optimizer's tensors: those with the shape of this rank's shard, and all others.
LOCAL, PLAIN = "local.", "plain."
_OF_RANK = re.compile(r"rank(\d+)\.(.+)", re.DOTALL)
log = logging.getLogger("zeropp")


def name_by_rank(
    tensors: Mapping[str, torch.Tensor], elsewhere: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return what this rank saves of `tensors`, by the names in the table; all ranks call it.

    `elsewhere` are the names of parameters that other ranks hold, and this one by design does not.
    """
    if world_size() == 1:
        return dict(tensors)
    kinds = {_plain_name(name): _kind(name, tensor) for name, tensor in tensors.items()}
    summary = hashlib.blake2b(repr(sorted(kinds.items())).encode()).digest()
    if len(set(gather_objects(summary))) == 1:
        return dict(tensors)
    absent = gather_objects(frozenset(elsewhere))
    unlike = _differing(gather_objects(kinds), absent)
    values = {  # a shard's shape on one rank may be an accident on another
        _plain_name(name): tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
        if _plain_name(name) in unlike
    }
    contents = {name: _digest(value) for name, value in values.items()}
    differing = _differing(gather_objects(contents), absent)
    named = {name: tensor for name, tensor in tensors.items() if _plain_name(name) not in unlike}
    for name, value in values.items():
        if name in differing:
            named[f"rank{rank()}.{name}"] = value
        if name not in differing or rank() == 0:
            named[name] = value
    return named


def names_for_rank(saved: Iterable[str], exact: str) -> dict[str, str]:
    """Return each tensor's name -> the name under which this rank reads it.

    At another number of ranks than saved, a rank reads what one of them had. That is refused, by an
    InputError, for tensors whose names do not start with `exact`.
    """
    names, of_ranks = {}, {}
    for saved_name in saved:
        if match := _OF_RANK.fullmatch(saved_name):
            of_ranks.setdefault(match[2], {})[int(match[1])] = saved_name
        else:
            names[saved_name] = saved_name
    if not of_ranks:
        return names
    count = 1 + max(number for by_rank in of_ranks.values() for number in by_rank)
    if count != world_size():
        refused = [name for name in of_ranks if not name.startswith(exact)]
        if refused:
            raise InputError(
                f"{first_few(refused)}: the optimizers of the {count} ranks that saved this "
                f"checkpoint differ in more than their shards, and there are {world_size()} ranks: "
                "load it without the optimizer's state"
            )
        log.warning(
            f"{first_few(list(of_ranks))}: each of the {count} ranks that saved this checkpoint "
            f"had its own; each of the {world_size()} ranks now gets that of one"
        )
    for name, by_rank in of_ranks.items():
        names.pop(name, None)
        if (number := rank() % count) in by_rank:
            names[name] = by_rank[number]
    return names


def without_rank(saved_name: str) -> str:
    """Return the name that the tensor has on its rank."""
    match = _OF_RANK.fullmatch(saved_name)
    return match[2] if match else saved_name


def _plain_name(name: str) -> str:
    return PLAIN + name.removeprefix(LOCAL) if name.startswith(LOCAL) else name


def _differing(of_ranks: list[dict[str, str]], absent: list[frozenset[str]]) -> set[str]:
    """Return the keys whose values are not the same on all ranks, or are missing on some.

    On a rank that has no such parameter, by `absent`, its values are not missing.
    """
    values: dict[str, set[str | None]] = {name: set() for each in of_ranks for name in each}
    for of_rank, without in zip(of_ranks, absent, strict=True):
        for name, distinct in values.items():
            _, _, rest = name.partition(".")
            if name in of_rank or without.isdisjoint((rest, rest.rpartition(".")[0])):
                distinct.add(of_rank.get(name))
    return {name for name, distinct in values.items() if len(distinct) > 1}


def _kind(name: str, tensor: torch.Tensor) -> str:
    """Say what ranks compare: whether it is a shard, or the content of anything else."""
    if isinstance(tensor, DTensor):
        return "shard of its parameter" if name.startswith(LOCAL) else "shard"
    return _digest(tensor)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = hashlib.blake2b(data.numpy(), digest_size=16).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {content}"
