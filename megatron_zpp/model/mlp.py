"""The MLP of a transformer block, and its nonlinearity.

With a tensor axis F is that of a rank. Shapes: B batch, S sequence, H hidden, F hidden of the MLP.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_zpp.model.attention.sequences import WHOLE_ROWS, Sequences
from megatron_zpp.model.part import WHOLE, Part
from megatron_zpp.model.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_zpp.parallel.axes import enter
from megatron_zpp.settings.capability_flags import CAPABILITIES
from megatron_zpp.settings.config import ModelConfig
from zeropp.optim import local_part
from zeropp.settings import declared
from zeropp.wire import Message

if TYPE_CHECKING:
    from megatron_zpp.recipe.activation_forecast import Forecast

QUICK_GELU = 1.702  # with which x sigmoid(1.702 x) is close to GELU


def gated(gate: Tensor, x: Tensor, config: ModelConfig) -> Tensor:
    """Multiply x by the activated gate, both of them clamped if the configuration says so."""
    limit = config.activation_func_clamp_value
    if limit is not None:
        gate, x = gate.clamp(max=limit), x.clamp(-limit, limit)
    if config.glu_linear_offset:
        x = x + config.glu_linear_offset
    return activate(gate, config) * x


def activate(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the MLP's nonlinearity: OpenAI's GELU is the tanh form, exact GELU the erf form."""
    if config.swiglu:
        return F.silu(x)  # of the gate
    if config.quick_geglu:
        return x * torch.sigmoid(QUICK_GELU * x)
    if config.liglu:
        return x
    if config.relu or config.reglu:
        return F.relu(x)
    if config.squared_relu:
        return squared_relu(x)
    is_approximate = config.openai_gelu or config.bias_gelu_fusion
    return F.gelu(x, approximate="tanh" if is_approximate else "none")


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)² (So et al. 2021, Primer)."""
    return F.relu(x).square()


class FeedForward(nn.Module):
    """The second branch of a block, and what is asked of it: an MLP, or what takes its place.

    It is built with a configuration, the number of a layer, and a `Part`. is_split: tensor ranks
    split it. A capability lists kinds of it as `FEED_FORWARDS` of its module `layer`, each by what
    in a configuration marks its layers.
    """

    is_split: bool = True

    @classmethod
    def messages(cls, forecast: "Forecast", stage: Part) -> Iterable[Message]:
        """Yield what its layers in a stage send for a micro-batch, beside the tensor axis."""
        return ()


def feed_forward(config: ModelConfig, layer: int) -> type[FeedForward]:
    """Return the kind of the second branch of a layer."""
    kinds = declared("FEED_FORWARDS", CAPABILITIES, "layer")
    return next((kind for marks, kind in kinds if getattr(config, marks)[layer]), MLP)


class MLP(FeedForward):
    """Two linear layers with a nonlinearity between them, and perhaps a third one as a gate.

    width: that inside it, by default the configuration's.
    """

    def __init__(
        self, config: ModelConfig, layer: int = 0, part: Part = WHOLE, *, width: int | None = None
    ) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, width or config.ffn_size, config.has_mlp_bias
        self.config, self.axis = config, (axis := part.tensor)
        self.input = ColumnParallelLinear(hidden, ffn, bias, axis)
        self.gate = None
        self.activation = XIELU() if config.xielu else None
        self.grad_is_partial = ("activation",)  # of a rank's channels
        if config.is_gated:
            self.gate = ColumnParallelLinear(hidden, ffn, bias, axis)
        self.output = RowParallelLinear(ffn, hidden, bias, axis, part.splits_rows)

    @classmethod
    def flops(cls, config: ModelConfig, width: int | None = None) -> float:
        """Return the operations of its matrices, which are `width` wide, for one token, forward."""
        num_matrices = 3 if config.is_gated else 2
        return 2 * num_matrices * config.hidden_size * (config.ffn_size if width is None else width)

    def forward(self, x: Tensor, sequences: Sequences = WHOLE_ROWS) -> Tensor:
        """Map x [B, S, H] to [B, S, H], through [B, S, F]."""
        splits_rows = sequences.splits_rows
        if self.axis is not None:
            x = enter(x, self.axis, splits_rows)
        if self.activation is not None:
            return self.output(self.activation(self.input(x)), splits_rows)
        if self.gate is None:
            return self.output(activate(self.input(x), self.config), splits_rows)
        return self.output(gated(self.gate(x), self.input(x), self.config), splits_rows)


class XIELU(nn.Module):
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010) with two learned numbers.

    For x > 0 it is p x² + βx, else n (eˣ - 1 - x) + βx, with p = softplus(alpha_p) and n = β +
    softplus(alpha_n). β and the largest x of which eˣ is computed are stored with the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))

    def reset(self) -> None:
        """Set first values: p and n 0.8, β 0.5."""
        for name, value in (("alpha_p", 0.8), ("alpha_n", 0.3)):
            local_part(getattr(self, name)).fill_(math.log(math.expm1(value)))
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Map each x of [B, S, F]."""
        p, n = F.softplus(local_part(self.alpha_p)), F.softplus(local_part(self.alpha_n))
        slope = torch.expm1(torch.minimum(x, self.eps.to(x.dtype))) - x
        return torch.where(x > 0, p * x * x, slope * (n + self.beta)) + self.beta * x
