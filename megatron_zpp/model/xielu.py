"""xIELU, a nonlinearity of the MLP with learned numbers. Shapes: B batch, S sequence, F hidden."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropp.optim import local_part


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
