"""What a rank's GPT is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from megatron_zpp.model.execution import Execution
from megatron_zpp.parallel.axes import ContextAxis, TensorAxis
from megatron_zpp.parallel.expert_axis import ExpertAxis


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
    experts: that over which the experts of its layers are.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    tensor: TensorAxis | None = None
    context: ContextAxis | None = None
    experts: ExpertAxis | None = None
    execution: Execution = field(default_factory=Execution)
    norms: NormClasses = TORCH_NORMS


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
