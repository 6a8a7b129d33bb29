"""What a rank's GPT is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from megatron_zpp.model.execution import Execution
from megatron_zpp.parallel.axes import ContextAxis, TensorAxis


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
    layer. tensor: the axis over which its layers are split. context: that over which sequences are.
    axes: those of capabilities, by their names; None for one over which nothing is split.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    tensor: TensorAxis | None = None
    context: ContextAxis | None = None
    axes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    execution: Execution = field(default_factory=Execution)
    norms: NormClasses = TORCH_NORMS

    @property
    def splits_rows(self) -> bool:
        """Whether between split layers each tensor rank has some rows (sequence parallelism)."""
        return self.tensor is not None and self.tensor.sequence_parallel


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
