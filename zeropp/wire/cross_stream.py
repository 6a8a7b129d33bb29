"""A tensor that is written on one stream and read, later, on any.

FSDP2 gathers on streams of its own, and on the current one where somebody calls `unshard`. On a CPU
there are no streams, and nothing happens here.
"""

import torch
from torch import Tensor


class CrossStreamTensor:
    """`tensor`, whose writing has been queued on the current stream."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._written = None
        if tensor.is_cuda:
            self._written = torch.cuda.current_stream(tensor.device).record_event()

    def here(self) -> Tensor:
        """The tensor, for the current stream, which waits until it is written.

        Its memory is not given to others before what this stream does with it is done.
        """
        if self._written is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self._written)
            self.tensor.record_stream(stream)
        return self.tensor
