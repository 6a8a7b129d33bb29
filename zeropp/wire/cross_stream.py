"""A tensor that is written on one CUDA stream and read later on any other.

FSDP2 gathers on its own streams, and on the current one if `unshard` is called. On a CPU there are
no streams, and this does nothing.
"""

import torch
from torch import Tensor


def record_use(tensor: Tensor) -> None:
    """Keep the tensor's memory from others until the current stream has finished with it.

    Otherwise memory that is freed is given at once to the stream that it was allocated on.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class CrossStreamTensor:
    """`tensor`, whose writing has been queued on the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._written = None
        if tensor.is_cuda:
            self._written = torch.cuda.current_stream(tensor.device).record_event()

    def on_current_stream(self) -> Tensor:
        """Return the tensor; the current stream waits until it is written.

        Its memory is not reused before this stream has finished with it.
        """
        if self._written is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self._written)
            record_use(self.tensor)
        return self.tensor
