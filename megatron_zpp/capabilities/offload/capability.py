"""What ZeRO-Offload says of a GPT's run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_zpp.recipe.capability import Capability
from zeropp import Sharding
from zeropp.capabilities.offload import offloaded_adamw, require_host_memory


@dataclass(kw_only=True)
class OffloadCapability(Capability):
    """The optimizer on the host, and maybe the weights."""

    setting = ("zero.zero_optimization.offload_optimizer.device", "cpu")

    def before_allocation(self, sharding: Sharding, device: torch.device) -> None:
        """Raise InputError if the host has too little memory."""
        zero, samples = self.config.zero, self.config.schedules.batch_size.final
        is_one_pass = samples <= self.config.batch.micro_batch_size * self.ranks.planned_parts
        adds = not (is_one_pass or zero.reduces_once)
        require_host_memory(sharding, device, adds_gradients=adds, **zero.masters)

    def build_optimizer(
        self, sharding: Sharding, groups: list[dict], device: torch.device, adam: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """Build AdamW on the host; the 16-bit weights are moved to `device`."""
        return offloaded_adamw(sharding, groups, device, self.config.zero, **adam)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield where the optimizer is."""
        if self.optimizer is None:  # the run is planned, and the planner says what is where
            return
        zero, text = self.config.zero, "on the host"
        if (ratio := zero.zero_optimization.offload_optimizer.ratio) < 1.0:
            text += f" for {ratio:.0%} of the weights"
        text += ": fp32 weights, gradients, moments, step"
        if zero.zeropp.delayed_param_update:
            warmup = zero.zeropp.delayed_param_update_warmup
            text += f"\nbeside the next step, after {warmup} steps"
        if zero.offloads_weights:
            text += "\nand the shards, fetched for each use"
        yield "optimizer", text


CAPABILITY = OffloadCapability
