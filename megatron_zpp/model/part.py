"""What a rank's GPT is made of."""

from dataclasses import dataclass, field

from torch import nn

from megatron_zpp.model.execution import Execution
from megatron_zpp.parallel.axes import ContextAxis, TensorAxis
from megatron_zpp.settings.config import LoraConfig


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
    lora: the adapters of its linear layers, without which all weights are trained.
    """

    layers: range | None = None
    is_first: bool = True
    is_last: bool = True
    tensor: TensorAxis | None = None
    context: ContextAxis | None = None
    lora: LoraConfig | None = None
    execution: Execution = field(default_factory=Execution)
    norms: NormClasses = TORCH_NORMS


WHOLE = Part()
