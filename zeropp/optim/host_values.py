"""Scalars copied from a device to the host without making the host wait."""

from functools import cached_property

import torch
from torch import Tensor

from zeropp.wire.cross_stream import HostCopy


class HostValues:
    """0-d tensors of one device that become floats when `values` is read; see `HostCopy`."""

    def __init__(self, *numbers: Tensor) -> None:
        self._copy = HostCopy(torch.stack([number.detach().double() for number in numbers]))

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values as floats, in the order of the constructor's arguments."""
        return tuple(self._copy.tolist())
