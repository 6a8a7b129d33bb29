"""What the ranks of a pipeline send their neighbours: activations onward, gradients back.

Each direction has a process group of its own, so that on no communicator two ranks wait for each
other. The tensors of a channel arrive in the order in which they were sent.
"""

from dataclasses import dataclass, fields

import torch.distributed as dist

from megatron_zpp.parallel.mesh import Ranks
from zeropp.wire import RankGroup


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Pairs of this rank and the one before or after it in a pipeline; None at an end."""

    activations_in: RankGroup | None
    activations_out: RankGroup | None
    gradients_in: RankGroup | None
    gradients_out: RankGroup | None


def connect(ranks: Ranks, *, is_ring: bool) -> Channels:
    """Connect this rank with its neighbours in the pipeline; all ranks call it.

    In a ring, the last sends activations to the first, which has several stages.
    """
    line, place = ranks.pipeline, ranks.pipeline_rank
    channels: dict[str, RankGroup] = dict.fromkeys(field.name for field in fields(Channels))
    for index in range(len(line) if is_ring else len(line) - 1):
        following = (index + 1) % len(line)
        for what, end, other_end in (("activations", "out", "in"), ("gradients", "in", "out")):
            for own, way in ((index, end), (following, other_end)):
                if own == place:  # the members meet here, in the same order on every rank
                    members = line[index], line[following]
                    group = ranks.rank_group("pipeline", members, name=f"{what} {index}")
                    dist.barrier(group=group.group)  # else it may connect at the first message
                    channels[f"{what}_{way}"] = group
    return Channels(**channels)
