"""What is written on one CUDA stream and read later, on any other or on the host.

FSDP2 gathers on its own streams, and on the current one if `unshard` is called. On a CPU there are
no streams, and this does nothing.
"""

import torch
from torch import Tensor

from zeropp.errors import InputError


def record_use(tensor: Tensor) -> None:
    """Keep the tensor's memory from others until the current stream has finished with it.

    Otherwise memory that is freed is given at once to the stream that it was allocated on.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def refuse_capture(device: torch.device, decision: str) -> None:
    """Raise InputError while a CUDA graph is captured, which would repeat a decision of the host.

    decision: what the host decides in each pass, as the beginning of a sentence.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"{decision} is decided on the host in each pass, and a CUDA graph would repeat one "
            "decision for ever: capture no passes of a model that zeropp has sharded or attached to"
        )


class CrossStreamTensor:
    """`tensor`, whose writing has been queued on the current stream; it may be written again.

    Whoever reads it takes note of it by `note_read`, on the stream that reads and once its reads
    are queued: the next one who writes in place waits for them.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._written = None
        self._reads: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        if tensor.is_cuda:
            self._written = torch.cuda.current_stream(tensor.device).record_event()

    def on_current_stream(self) -> Tensor:
        """Return the tensor to be read; the current stream waits until it is written.

        Its memory is not reused before this stream has finished with it.
        """
        if self._written is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self._written)
            record_use(self.tensor)
        return self.tensor

    def for_writing(self) -> Tensor:
        """Return the tensor to be written in place; the current stream waits for all reads too."""
        for read in self._reads.values():
            torch.cuda.current_stream(self.tensor.device).wait_event(read)
        return self.on_current_stream()

    def note_read(self) -> None:
        """Take note that the current stream reads the tensor, up to what is queued on it now."""
        if self._written is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            self._reads[stream] = stream.record_event(self._reads.get(stream))


class HostCopy:
    """A tensor's values on the host. On a GPU the copy is queued here, and the host goes on.

    Reading them waits for that copy, and for nothing queued after it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._arrival = tensor, None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrival = torch.cuda.current_stream(tensor.device).record_event()

    def tolist(self) -> list:
        """Return the values as Python's numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values.tolist()
