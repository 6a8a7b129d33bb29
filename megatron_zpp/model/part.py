"""What a rank's GPT is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megatron_zpp.model.execution import Execution
from megatron_zpp.parallel.rank_grid import RankGrid
from megatron_zpp.settings.config import ParallelConfig
from zeropp.wire import RankGroup


@dataclass(frozen=True, kw_only=True)
class NormClasses:
    """The classes of normalizations whose weights are gains; called with a size and `eps`."""

    layer_norm: type[nn.Module] = nn.LayerNorm
    rms_norm: type[nn.Module] = nn.RMSNorm


TORCH_NORMS = NormClasses()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a GPT that a rank has, and how it computes it; by default the whole, alone.

    layers: its blocks, None for all. is_first: it has the embedding. is_last: it has the output
    layer. tensor: the ranks that each have a part of its matrices. context: those that each have a
    part of each sequence. axes: those of capabilities, by their names; None for one over which
    nothing is split. splits_rows: between split layers each tensor rank has some rows (sequence
    parallelism). gathers_keys: attention gathers keys and values from the context ranks, instead of
    exchanging heads for rows.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    tensor: RankGroup | None = None
    context: RankGroup | None = None
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    execution: Execution = field(default_factory=Execution)
    norms: NormClasses = TORCH_NORMS
    splits_rows: bool = False
    gathers_keys: bool = False

    def over(self, ranks: RankGrid, parallel: ParallelConfig) -> "Part":
        """Return this part split over ranks that share matrices or sequences."""
        return replace(
            self,
            tensor=ranks.tensor_group if ranks.tensor_size > 1 else None,
            context=ranks.context_group if ranks.context_size > 1 else None,
            splits_rows=ranks.tensor_size > 1 and parallel.sequence_parallel,
            gathers_keys=parallel.cp_comm_type == "allgather",
        )


WHOLE = Part()


def parts_of_stages(
    common: Part, stages: Sequence[range], place: int = 0, size: int = 1
) -> list[Part]:
    """Return the parts of a rank's stages: those numbered `place`, `place` + `size` and so on.

    `stages` are the layers of all of them, and `common` has the other fields.
    """
    last = len(stages) - 1
    return [
        replace(common, layers=stages[index], is_first=index == 0, is_last=index == last)
        for index in range(place, len(stages), size)
    ]
