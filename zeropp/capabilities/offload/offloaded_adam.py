"""Adam on master weights in host memory: one bucket is sent while the next is updated."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.capabilities.offload.host_masters import HOST, Offload
from zeropp.capabilities.offload.master_state_dicts import use_in_state_dicts
from zeropp.errors import InputError
from zeropp.optim.adam import FusedAdam, Update
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
    """Build our AdamW from the JSON's `offload_optimizer`, for a model that computes on `device`.

    Weights are moved there unless `offload_param` keeps them on the host. Raises InputError as
    `Offload` does.
    """
    if config.optimizer.params.torch_adam:
        log.info("torch_adam has no effect here: the offloaded AdamW is ours, in one pass")
    offload, kind = Offload(sharding, device, **config.masters), OffloadedAdam
    if config.zeropp.delayed_param_update:
        kind, options["warmup"] = DelayedAdam, config.zeropp.delayed_param_update_warmup
    optimizer = kind(offload, groups, **options)
    use_in_state_dicts(sharding.model, optimizer)
    return optimizer


class OffloadedAdam(FusedAdam):
    """`FusedAdam` on the masters of an `Offload`; `groups` hold the model's parameters.

    moments: their dtype, and the seed of their stochastic rounding, as in `CPUAdam`.
    """

    why_fixed = "an offloaded optimizer holds its own copies of the weights"

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
        master_groups = [  # frozen parameters have no master
            {**group, "params": [masters.get(each, each) for each in group["params"]]}
            for group in groups
        ]
        super().__init__(master_groups, copies=offload.copies, **settings)

    @property
    def masters(self) -> Mapping[nn.Parameter, nn.Parameter]:
        """The model's parameters -> their fp32 weights, after the last step."""
        self.settle()
        return self.offload.masters

    def __getstate__(self) -> dict[str, Any]:
        raise InputError(
            "an optimizer on the host cannot be copied or pickled, because its weights are those "
            "of one sharded model: make another one, and load_state_dict(state_dict())"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state. The list of groups stays the same object, as a schedule may hold it."""
        groups = getattr(self, "param_groups", [])
        super().__setstate__(state)
        groups[:] = self.param_groups
        self.param_groups = groups

    def await_gradients(self) -> None:
        """Wait until the gradients are on the host."""
        self.offload.wait()

    def loaded(self, *, behind: bool) -> None:
        """Round and send the masters after they were read from a file.

        With `behind`, the model's own weights were read too and are kept.
        """
        self.offload.write(send=not behind)

    def _updates(self, group: dict[str, Any], seed: int) -> Iterable[Update]:
        for bucket in self.offload.buckets(group["params"]):
            yield from super()._updates({**group, "params": bucket}, seed)

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        for update in updates:
            self._update(update, factor)
            self.offload.send(update.parameters)

    def _update(self, update: Update, factor: Tensor | None) -> None:
        device = update.arrays.parameters[0].device
        super()._apply([update], factor if factor is None else factor.to(device))


class DelayedAdam(OffloadedAdam):
    """Each update runs on the host while the device computes the next gradients with old weights.

    After the first `warmup` steps, gradients are those of weights one update behind. Checkpoints
    hold both. Source: ZeRO-Offload (Ren et al. 2021), section 5.2.
    """

    is_delayed = True

    def __init__(
        self, offload: Offload, groups: list[dict[str, Any]], *, warmup: int, **settings: Any
    ) -> None:
        self._warmup = warmup
        self._thread = ThreadPoolExecutor(1, "delayed update")
        self._running: Future | None = None
        self._unsent: list[Tensor] = []
        super().__init__(offload, groups, **settings)
        offload.before_access(self.settle)

    def settle(self) -> None:
        """Wait for the running update; its weights are sent in the next step."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
        super().settle()

    def loaded(self, *, behind: bool) -> None:
        """As in `OffloadedAdam`; with `behind`, the masters are sent in the next step."""
        super().loaded(behind=behind)
        self._unsent = list(self.masters.values()) if behind else []

    def _apply(self, updates: Sequence[Update], factor: Tensor | None) -> None:
        self.offload.send(self._unsent)
        self._unsent = []
        if max((update.settings.step for update in updates), default=1) <= self._warmup:
            super()._apply(updates, factor)
            return
        factor = factor if factor is None else factor.to(HOST)
        self.offload.swap_gradients()
        self._unsent = [master for update in updates for master in update.parameters]
        on_host = [update for update in updates if update.arrays.parameters[0].device == HOST]
        for update in updates:
            if update.arrays.parameters[0].device != HOST:
                self._update(update, factor)
        threads = torch.get_num_threads()
        self._running = self._thread.submit(self._update_all, on_host, factor, threads)

    @torch.no_grad()
    def _update_all(self, updates: Sequence[Update], factor: Tensor | None, threads: int) -> None:
        if torch.get_num_threads() != threads:  # each thread has a number of its own
            torch.set_num_threads(threads)
        for update in updates:
            self._update(update, factor)
