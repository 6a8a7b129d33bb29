"""Adam on masters in host memory: each bucket goes to the device while the next is updated."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.config import ZeroConfig
from zeropp.offload import HOST, Offload
from zeropp.optim.adam import FusedAdam
from zeropp.optim.step import local_part
from zeropp.sharding import Sharding


def offloaded_adamw(
    sharding: Sharding,
    groups: list[dict[str, Any]],
    device: torch.device,
    config: ZeroConfig,
    **options: Any,
) -> "OffloadedAdam":
    """AdamW as the JSON's `offload_optimizer` says; weights not on `device` yet are moved there.

    With `offload_param` they stay on the host. Raises InputError as `Offload` does.
    """
    place, settings = HOST if config.offloads_weights else device, config.zero_optimization
    offload = Offload(
        sharding,
        place,
        ratio=settings.offload_optimizer.ratio,
        pin_memory=settings.offload_optimizer.pin_memory,
    )
    return OffloadedAdam(offload, groups, **options)


class OffloadedAdam(FusedAdam):
    """`FusedAdam` on the masters of an `Offload`; groups are given by the model's parameters."""

    def __init__(self, offload: Offload, groups: list[dict[str, Any]], **settings: Any) -> None:
        self.offload = offload
        masters = offload.masters
        held = [
            {**group, "params": [masters[one] for one in group["params"]]} for group in groups
        ]
        super().__init__(held, copies=offload.copies, **settings)

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The model's parameters -> the fp32 weights in their places."""
        return self.offload.masters

    def await_gradients(self) -> None:
        """Wait until the gradients are on the host."""
        self.offload.wait()

    def _step_group(self, group: dict[str, Any], factor: Tensor | None, seed: int) -> None:
        for bucket in self.offload.buckets(group["params"]):
            place = local_part(bucket[0]).device
            here = factor if factor is None else factor.to(place)
            super()._step_group({**group, "params": bucket}, here, seed)
            with torch.no_grad():
                self.offload.send(bucket)
