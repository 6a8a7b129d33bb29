"""`get_accelerator()`: this process's device, by the names that DeepSpeed's programs ask for."""

import functools
from typing import Any

import torch

from zeropp.ranks.process_group import pick_device
from zeropp.ranks.topology import Environment


class Accelerator:
    """The GPU of this rank, or the CPU on a machine without one.

    What is not defined here, such as `current_device`, `is_available` or `Stream`, is that of
    `torch.cuda` or `torch.cpu`, or of torch itself, as `get_rng_state` of the CPU is.
    """

    def __init__(self) -> None:
        self._device = pick_device(Environment.read())
        self._torch = torch.cuda if self._device.type == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch if hasattr(self._torch, name) else torch, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda", or "cuda:N" for a number."""
        if device_index is None or self._device.type == "cpu":
            return self._device.type
        return f"{self._device.type}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device of that number, by default this rank's."""
        own = device_index is None
        return self._device if own else torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make the GPU of that number the current one; the CPU has no numbers."""
        if self._device.type == "cuda":
            torch.cuda.set_device(device_index)
            self._device = torch.device("cuda", device_index)

    def current_device_name(self) -> str:
        """Return "cuda:N" or "cpu"."""
        return str(self._device)

    def device_count(self) -> int:
        """Return the number of GPUs of this machine, or of ranks of this node on CPUs."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.device_count() if is_cuda else Environment.read().local_world_size

    def is_synchronized_device(self) -> bool:
        """Whether operations have ended when they return, as the CPU's have."""
        return self._device.type == "cpu"

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return self._device.type == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The formats that engines compute in on the device."""
        dtypes = [torch.float32, torch.float16]
        return [*dtypes, torch.bfloat16] if self.is_bf16_supported() else dtypes

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a device of this kind."""
        return tensor.device.type == self._device.type

    def empty_cache(self) -> None:
        """Return unused GPU memory to the system."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random numbers of this process's devices."""
        torch.manual_seed(seed)


@functools.cache
def get_accelerator() -> Accelerator:
    """Return this process's device.

    Returns:
        The device with the interface of DeepSpeed's accelerators.

    Example:
        ```python
        inputs = inputs.to(deepspeed.get_accelerator().current_device_name())
        ```
    """
    return Accelerator()
