"""Where a sharded model's averaged gradients are."""

from collections.abc import Mapping

import torch
from torch import nn


class Gradients:
    """The averaged gradients of a model: its parameters hold them, or their masters do."""

    def __init__(self) -> None:
        self._masters: Mapping[nn.Parameter, nn.Parameter] = {}
        self._parameters: Mapping[nn.Parameter, nn.Parameter] = {}  # of masters

    def use_masters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Look for the gradients of these parameters in their masters."""
        self._masters = masters
        self._parameters = {master: parameter for parameter, master in masters.items()}

    @property
    def has_masters(self) -> bool:
        return bool(self._masters)

    def parameter_of(self, holder: nn.Parameter) -> nn.Parameter:
        """Return the parameter whose master this is, or the parameter itself."""
        return self._parameters.get(holder, holder)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter."""
        return self._masters.get(parameter, parameter).grad

    def clear(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of a parameter."""
        self._masters.get(parameter, parameter).grad = None
