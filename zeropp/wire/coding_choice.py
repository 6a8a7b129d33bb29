"""Whether coding messages takes less time than it saves: measured once, agreed on by all ranks.

A sample crosses nodes as it is, on all ranks at once, as in a step; then it is coded and decoded.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist

from zeropp.quant.coded_message import decode, encode
from zeropp.quant.ops import quantize
from zeropp.quant.packing import row_layout
from zeropp.ranks.groups import shared_group, uses_gloo
from zeropp.wire.route import Route

SAMPLE = 2**20  # numbers
REPEATS = 3  # of which the fastest counts
BITS = MappingProxyType({"weights": 8, "gradients": 4})
MOVED = 0.2  # of the codes of weights, from one step to the next, in a typical run


def with_choice(
    route: Route, purpose: str, axis: Sequence[int], position: int, device: torch.device
) -> Route:
    """Return the route with the choice made whether messages between nodes are coded.

    `axis` are the ranks of the data axis, all of which call it and get the same answer.
    """
    if route.is_coded is not None:
        return route
    members = [axis[member] for member in route.outer_hop(position).members]
    group = shared_group(purpose, members, axis)
    is_faster = uses_gloo(group) and _is_coding_faster(group, axis, purpose, device)
    return replace(route, is_coded=is_faster)


def _is_coding_faster(
    group: dist.ProcessGroup, axis: Sequence[int], purpose: str, device: torch.device
) -> bool:
    row, held = _sample(purpose)
    message = encode(row, held=held)
    size = dist.get_world_size(group)
    rows = row.to(device).repeat(size, 1)
    arrived = torch.empty_like(rows)

    def cross() -> None:
        dist.all_to_all_single(arrived, rows, group=group)
        arrived[0, 0].item()  # the host waits for it

    def code() -> None:
        encode(row, held=held)
        decode(message, row.clone() if held is None else held.clone(), holds=held is not None)

    saved = _seconds(cross) * (1 - len(message) / len(row)) - size * _seconds(code)
    total = torch.tensor([saved])
    dist.all_reduce(total, group=shared_group("coding", axis, axis))
    return total.item() > 0


def _sample(purpose: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a packed row (P,), and for weights what is held of it."""
    generator = torch.Generator().manual_seed(0)
    layout = row_layout((SAMPLE,), (BITS[purpose],), torch.bfloat16)
    row = quantize(torch.randn(1, SAMPLE, generator=generator), layout)[0]
    if purpose == "gradients":
        return row, None
    moves = torch.rand(len(row), generator=generator) < MOVED
    return row, row - moves.to(torch.uint8)


def _seconds(action: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)
