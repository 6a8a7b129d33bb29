"""Adam on masters in host memory: each bucket goes to the device while the next is updated."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.optim.adam import FusedAdam, Update
from zeropp.optim.offload import HOST, Offload
from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.sharding import Sharding

log = logging.getLogger("zeropp")


def offloaded_adamw(
    sharding: Sharding,
    groups: list[dict[str, Any]],
    device: torch.device,
    config: ZeroConfig,
    **options: Any,
) -> "OffloadedAdam":
    """Our AdamW as the JSON's `offload_optimizer` says; weights not on `device` are moved there.

    With `offload_param` they stay on the host. Raises InputError as `Offload` does.
    """
    settings, delay = config.zero_optimization.offload_optimizer, config.zeropp
    if config.optimizer.params.torch_adam:
        log.info("torch_adam has no effect here: the offloaded AdamW is ours, in one pass")
    offload = Offload(
        sharding,
        HOST if config.offloads_weights else device,
        ratio=settings.ratio,
        pin_memory=settings.pin_memory,
        delayed=delay.delayed_param_update,
    )
    if delay.delayed_param_update:
        return DelayedAdam(offload, groups, warmup=delay.delayed_param_update_warmup, **options)
    return OffloadedAdam(offload, groups, **options)


class OffloadedAdam(FusedAdam):
    """`FusedAdam` on the masters of an `Offload`; groups are given by the model's parameters.

    moments: their dtype, and the seed of the chance that rounds them, as `CPUAdam`'s.
    """

    is_delayed = False  # the model's weights are those of the last step

    def __init__(
        self,
        offload: Offload,
        groups: list[dict[str, Any]],
        *,
        moments: tuple[torch.dtype, int] = (torch.float32, 0),
        **settings: Any,
    ) -> None:
        self.offload = offload
        self.moment_dtype, self.seed = moments
        masters = offload.masters
        held = [  # what is frozen has no master
            {
                **group,
                "params": [masters.get(parameter, parameter) for parameter in group["params"]],
            }
            for group in groups
        ]
        super().__init__(held, copies=offload.copies, **settings)

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The model's parameters -> the fp32 weights in their places, the last step done."""
        self.settle()
        return self.offload.masters

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As `FusedAdam`'s; the list of groups stays the same one, as a schedule may hold it."""
        held = getattr(self, "param_groups", [])
        super().__setstate__(state)
        held[:] = self.param_groups
        self.param_groups = held

    def await_gradients(self) -> None:
        """Wait until the gradients are on the host."""
        self.offload.wait()

    def loaded(self, *, behind: bool) -> None:
        """The masters have been read from a file: round them and send them.

        behind: the model's own weights were read too, and stay.
        """
        self.offload.write(send=not behind)

    def _updates(self, group: dict[str, Any], seed: int) -> Iterable[Update]:
        for bucket in self.offload.buckets(group["params"]):
            yield from super()._updates({**group, "params": bucket}, seed)

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        for update in updates:
            self._update(update, factor)
            self.offload.send(update.parameters)

    def _update(self, one: Update, factor: Tensor | None) -> None:
        place = one.arrays.parameters[0].device
        super()._apply([one], factor if factor is None else factor.to(place))


class DelayedAdam(OffloadedAdam):
    """Each update runs on the host while the device makes the next gradients, with old weights.

    So every step but the first `warmup` ones uses gradients of weights one update behind.
    Checkpoints hold both. Source: ZeRO-Offload (Ren et al. 2021), section 5.2.
    """

    is_delayed = True

    def __init__(
        self, offload: Offload, groups: list[dict[str, Any]], *, warmup: int, **settings: Any
    ) -> None:
        self._warmup = warmup
        self._thread = ThreadPoolExecutor(1, "delayed update")
        self._underway: Future | None = None
        self._unsent: list[Tensor] = []
        super().__init__(offload, groups, **settings)
        offload.before_access(self.settle)

    def settle(self) -> None:
        """Wait for the update that runs; its weights are sent in the next step."""
        if self._underway is not None:
            underway, self._underway = self._underway, None
            underway.result()
        super().settle()

    def loaded(self, *, behind: bool) -> None:
        """As `OffloadedAdam`'s; what stays behind is sent in the next step."""
        super().loaded(behind=behind)
        self._unsent = list(self.masters.values()) if behind else []

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        self.offload.send(self._unsent)
        self._unsent = []
        if max((update.settings.step for update in updates), default=1) <= self._warmup:
            super()._apply(updates, factor)
            return
        factor = factor if factor is None else factor.to(HOST)
        self.offload.turn()
        self._unsent = [master for update in updates for master in update.parameters]
        on_host = [update for update in updates if update.arrays.parameters[0].device == HOST]
        for one in updates:
            if one.arrays.parameters[0].device != HOST:
                self._update(one, factor)
        self._underway = self._thread.submit(self._update_all, on_host, factor)

    @torch.no_grad()
    def _update_all(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        for update in updates:
            self._update(update, factor)
