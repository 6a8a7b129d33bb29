"""Numbers on their way from the device to the host, which need not wait for them."""

from functools import cached_property

import torch
from torch import Tensor


class HostValues:
    """Numbers of one device, 0-d tensors each, as floats once somebody asks for `values`.

    On a GPU their copy is queued here, behind what computes them. Asking waits for that copy, and
    for nothing that was queued after it.
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
        """The numbers, in the order given."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return tuple(self._numbers.tolist())
