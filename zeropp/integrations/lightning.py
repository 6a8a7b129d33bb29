"""Lightning's Trainer, with a module that `configure_model` shards by `fully_shard`.

callback = ZeroppCallback("ds_zeropp_config.json")
Trainer(strategy=ModelParallelStrategy(...), callbacks=[callback])
"""

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from zeropp.settings.zero_config import ZeroConfig
from zeropp.sharding.attach import Attached, attach


class ZeroppCallback(Callback):
    """Attaches the module when training begins; `attached` is what `zeropp.attach` returned.

    `config` is as for `zeropp.attach`. Where it does not say `zeropp.ranks_per_node`, a node has as
    many ranks as the Trainer has devices: Lightning's own launcher does not tell the ranks. The
    module stays attached after training, for evaluation and further training.
    """

    def __init__(self, config: ZeroConfig | Mapping | str | Path) -> None:
        self.config = config
        self.attached: Attached | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the module, which has been sharded and has an optimizer."""
        if self.attached is None or self.attached.model is not pl_module:
            config = self.config
            if not isinstance(config, ZeroConfig):
                per_node = {"zeropp.ranks_per_node": trainer.num_devices}
                config = ZeroConfig.from_json(config, per_node)
            self.attached = attach(pl_module, config)
