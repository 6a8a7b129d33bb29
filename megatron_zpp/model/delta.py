"""What may be added to the product of a linear layer whose weight stays as it is.

    y = W x + b + delta(x)

The modules of a delta are children of the layer: its parameters are named and gathered with it.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

from torch import Tensor, nn

from megatron_zpp.settings.capability_flags import CAPABILITIES
from zeropp.settings import declared

MODULES = frozenset(declared("DELTA_MODULES", CAPABILITIES))  # names of modules of deltas


class Delta(Protocol):
    """Computes what is added to a layer's product; in training with `dropout` of its input."""

    dropout: float

    def term(self, layer: nn.Module, x: Tensor, *counts: Tensor) -> Tensor:
        """Return [..., out] for x [..., in]; counts: of rows for each matrix, if a layer has many.

        The layer has the delta's modules.
        """


class TakesDelta(nn.Module):
    """A layer that adds a delta to its product, if it has been given one.

    `by_default`: whether the layer is meant where no layers are named.
    """

    by_default: ClassVar[bool] = True
    delta: Delta | None = None

    def take(self, delta: Delta, modules: Mapping[str, nn.Module]) -> None:
        """Add what a delta computes with these modules from now on."""
        self.delta = delta
        for name, module in modules.items():
            self.add_module(name, module)

    def factors(self, rank: int) -> tuple[nn.Module, nn.Module]:
        """Return layers A [rank, in] and B [out, rank], split among ranks as the weight is."""
        raise NotImplementedError


def is_of_delta(name: str) -> bool:
    """Whether a parameter of this name belongs to a delta, not to the GPT itself."""
    return not MODULES.isdisjoint(name.split("."))
