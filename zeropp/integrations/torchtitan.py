"""torchtitan: a model's `parallelize_fn`, followed by ZeRO++.

spec = model_registry("8B")
parallelize = AttachedParallelize(spec.parallelize_fn, "ds_zeropp_config.json")
spec = dataclasses.replace(spec, parallelize_fn=parallelize)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.attach import Attached, attach


class AttachedParallelize:
    """Calls torchtitan's function and attaches what it has sharded.

    `config` is as for `zeropp.attach`. `attached` has what that returned, of a pipeline for each
    stage of this rank.
    """

    def __init__(
        self,
        parallelize: Callable[..., nn.Module],
        config: ZeroConfig | Mapping | str | Path,
    ) -> None:
        self.parallelize, self.config = parallelize, config
        self.attached: list[Attached] = []

    def __call__(self, model: nn.Module, **options: Any) -> nn.Module:
        """Parallelize and attach a model, which may be on the meta device."""
        model = self.parallelize(model, **options)
        self.attached.append(attach(model, self.config))
        return model
