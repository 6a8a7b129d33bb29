"""Scalars copied from a device to the host without making the host wait."""

from functools import cached_property

import torch
from torch import Tensor


class HostValues:
    """0-d tensors of one device that become floats when `values` is read.

    On a GPU the copy is queued here, behind the kernels that compute the tensors. Reading waits for
    that copy, and for nothing queued after it.
    """

    def __init__(self, *numbers: Tensor) -> None:
        self._numbers = torch.stack([number.detach().double() for number in numbers])
        self._arrival = None
        if self._numbers.is_cuda:
            computed = self._numbers
            self._numbers = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=True)
            self._numbers.copy_(computed, non_blocking=True)
            self._arrival = torch.cuda.current_stream(computed.device).record_event()

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values as floats, in the order of the constructor's arguments."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return tuple(self._numbers.tolist())
